"""Fast kernels that prove themselves on the device: each is compared with eager attention in fp32 and timed, once for a device,
its driver and these versions. docs/kernels.md"""
