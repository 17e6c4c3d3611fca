"""What tests and benchmarks share: groups of ranks that start at once, and many runs of train.py in one group."""
