"""Whether GPUs, cores, memory and limits are what the slots need."""
