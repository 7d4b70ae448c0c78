"""The files that are published with a drafter checkpoint; importable here as `dspark_hf.modeling`."""
