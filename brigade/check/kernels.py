"""Whether fast kernels compute the right thing on each host's devices."""
