"""Ctrl-C and SIGTERM end a training run at once, and say where it stands and how it goes on. No tracebacks."""

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

# Who holds it says why this process ends: an error that a stop brings about is none.
leaving = threading.RLock()
where: Callable[[], str] = lambda: "before its first step; the same command begins again"  # noqa: E731


def listen(is_main_rank: bool) -> None:
    """End this process when it is asked to, whatever its main thread does: that may wait in C for ranks that are gone, where
    no handler of Python's runs. Data readers that it forks leave Ctrl-C to it.

    is_main_rank: whether this rank tells `where()`
    """
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]  # nohup
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_leave_it_to_the_parent)
    threading.Thread(target=_end, args=(heard, set(numbers), is_main_rank), daemon=True).start()


def _leave_it_to_the_parent() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(heard: int, numbers: set[int], is_main_rank: bool) -> None:
    while (number := os.read(heard, 1)[0]) not in numbers:  # SIGCHLD, for one
        pass
    leaving.acquire()
    if is_main_rank:
        sys.stdout.flush()
        by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        print(f"{chr(10) * sys.stderr.isatty()}Stopped by {by} {where()}", file=sys.stderr, flush=True)  # below a bar
    else:
        time.sleep(0.5)  # the rank that prints has the signal too by now; it would take this one's end for a failure
    default = ctypes.CDLL(None).signal
    for one in numbers:
        # From here on a second one ends what takes long; Python's own function is the main thread's alone.
        default(one, 0)
    for child in multiprocessing.active_children():
        child.kill()  # else the next line waits for them
    atexit._run_exitfuncs()  # as at any end: wandb's last upload, for one
    os.kill(os.getpid(), number)  # so that shell and launcher see what ended it
    os._exit(128 + number)
