"""What runs a strategy: one process, DDP, DeepSpeed, FSDP2 and pipelines, with the axes in parallel/."""
