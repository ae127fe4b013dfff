"""Coverage: which ways of writing MoE are found, raised and exact; see `python -m benchmarks.coverage --help`."""
