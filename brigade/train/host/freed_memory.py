"""What a process does with memory that it has freed, where tensors lie in the host's memory. Needs only the standard library."""

import ctypes
import os

_OPTIONS = (-3, -1)  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's malloc.h
_MOST = 2**31 - 1  # of an int: bytes
_CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")  # a user's variables, beside GLIBC_TUNABLES


def keep() -> bool:
    """Let this process keep memory that it frees for its next tensors, and return whether its C library does.

    By default glibc hands large blocks and the end of its heap back to the system (mallopt(3)). So each step takes new pages for
    gradients and logits, and the kernel fills these with zeros first. What a user has set in the environment stays.
    """
    chosen = any(name in os.environ for name in _CHOSEN) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = None if chosen else getattr(ctypes.CDLL(None), "mallopt", None)  # musl and macOS have none
    return mallopt is not None and all(mallopt(option, _MOST) for option in _OPTIONS)
