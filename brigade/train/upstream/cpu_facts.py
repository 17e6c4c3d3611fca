"""What py-cpuinfo knows of this host's CPU, asked once."""

import functools


def ask_once() -> None:
    """Let py-cpuinfo look at the CPU once in this process and in those that it forks: it takes a second of computing.

    DeepSpeed asks twice for each kernel (ops/op_builder/builder.py: cpu_arch, simd_width) and once for each optimizer on the CPU
    (ops/adam/cpu_adam.py): a rank with states on the CPU began two seconds later, one with states on NVMe four.
    """
    from cpuinfo import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info_json, "cache_info"):  # get_cpu_info makes a new dict of this text each time
        cpuinfo.get_cpu_info_json = functools.cache(cpuinfo.get_cpu_info_json)
