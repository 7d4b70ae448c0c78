"""Slow and obvious versions of what the package computes; tests compare against them."""
