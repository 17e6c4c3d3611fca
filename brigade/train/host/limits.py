"""How much Brigade takes from a file before it refuses it: bounds far above honest use, against what is built to expand."""

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

# Of a recipe, run.yaml, ds_config or accelerate config; the largest that ships has 5 kB and 100 nodes.
CONFIG_BYTES = 1_000_000
YAML_NODES = 100_000  # keys, values and entries; an alias counts as all that it stands for
# Of the data. The longest honest rows are books of some MB.
ROW_BYTES = 64 * 2**20  # a line of JSON, a cell of CSV
DOCUMENT_BYTES = 8 * 2**30  # a file of JSON that is read as a whole
DECODED_BYTES = 4 * 2**30  # of memory for a chunk of rows, at most 1000, beside what the file itself takes
# an image, encoded; how many pixels it may have is PIL's own limit (MAX_IMAGE_PIXELS, 89 million)
IMAGE_BYTES = 256 * 2**20
TEMPLATE_SECONDS = 30.0  # to render one chat; usual ones take 1 ms
TEMPLATE_BYTES = 2**30  # of memory to try a template, or to render one question; usual ones take 1 MiB
# of a rendered chat: of the template's own, and for each letter of the chat
TEMPLATE_LETTERS, TEMPLATE_GROWTH = 2**18, 8


class _OverTime(BaseException):
    """Not an Exception, so that no code on the way takes it for a template's own refusal."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError where the body takes longer. Only a process's main thread has such a limit, for it comes by a signal;
    another limit that ends sooner prevails."""
    is_main, left = threading.current_thread() is threading.main_thread(), signal.getitimer(signal.ITIMER_REAL)[0]
    if not is_main or 0 < left < seconds:
        yield
        return

    def ring(*_: object) -> NoReturn:
        raise _OverTime

    before, began = signal.signal(signal.SIGALRM, ring), time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _OverTime:
        raise TimeoutError(f"it takes longer than {seconds:g} s") from None
    finally:
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left - (time.monotonic() - began)))


@contextmanager
def memory_limit(more: int = DECODED_BYTES) -> Iterator[None]:
    """Let this process have so many bytes more than now; whatever asks for more gets MemoryError.

    Only the main thread sets a limit, for threads would take each other's for the usual one. Nothing happens where the kernel
    does not count (RLIMIT_DATA, before Linux 4.7).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = 0
    with suppress(OSError, ValueError, IndexError):
        used = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    wanted = used + more
    is_main = threading.current_thread() is threading.main_thread()
    if not used or not is_main or (soft != resource.RLIM_INFINITY and soft < wanted):
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def gib(size: int) -> str:
    """Return `4 GiB` for 2**32."""
    return f"{size / 2**30:g} GiB"
