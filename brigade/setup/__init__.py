"""What `make setup` runs: the system's packages and DeepSpeed's kernels."""
