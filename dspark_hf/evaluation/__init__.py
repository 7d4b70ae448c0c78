"""Measuring: benchmarks that write one JSON record each."""
