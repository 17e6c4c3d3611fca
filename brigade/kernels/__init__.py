"""Fast kernels prove themselves on the device: each is compared with eager attention in fp32 and timed, once for each device,
its driver and the installed versions (docs/gpu.md)."""
