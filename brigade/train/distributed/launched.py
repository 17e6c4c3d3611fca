"""A rank that a launcher started ends with it, and under `launch` is watched: its first process watches over a second, in which
train.py goes on.

The launchers (torchrun, deepspeed, accelerate) are the parents of ranks and tell how one ended in 40 lines or not at all.
Here the parent of the training process is ours: it hands every line, exit code and signal to the host's agent, through a
socket that BRIGADE_DOOR names. When the agent is gone, so is the rank: nothing is left behind on the host.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import struct
import sys
import threading
import time

from ..host import processes
from .process import this_process

DOOR = "BRIGADE_DOOR"
PR_SET_PDEATHSIG = 1


def supervise() -> None:
    """Under `launch`: fork; the child returns from here and trains, the parent never does. Otherwise: nothing.

    Must come before any thread and any heavy import.
    """
    door = os.environ.pop(DOOR, None)
    if not door or "RANK" not in os.environ:
        return
    agent = socket.socket(socket.AF_UNIX)
    try:
        agent.connect("\0" + door)
        if owner(agent) != os.getuid():
            raise PermissionError(f"{door} is another user's")
    except OSError:
        os._exit(1)  # the agent is gone, and with it whoever wanted this run
    sys.stdout.flush()
    sys.stderr.flush()
    out, out_end = os.pipe()
    notes, notes_end = os.pipe()
    wake, wake_end = os.pipe()
    os.set_blocking(wake_end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # not pidfd_open: Linux before 5.3 and some Pythons lack it
    signal.set_wakeup_fd(wake_end)
    child = os.fork()
    if child:
        os.close(out_end)
        os.close(notes_end)
        from .watcher import watch

        watch(child, agent, out, notes, wake)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    agent.close()
    for end in (out, notes, wake, wake_end):
        os.close(end)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(out_end, 1)
    os.dup2(out_end, 2)
    os.close(out_end)
    os.set_inheritable(notes_end, False)
    this_process.agent.begin(notes_end)
    this_process.heartbeat.share()
    faulthandler.register(signal.SIGQUIT, all_threads=True)  # as a JVM does: the agent asks a rank that hangs


def end_with_launcher() -> None:
    """Under torchrun, accelerate or deepspeed: end this rank when the process that started it is gone, by a SIGKILL for
    example. It would train on unseen, into the directory where the user starts the run again.

    `deepspeed` starts a process that starts the ranks: a rank ends with either. A rank that nothing launched outlives its shell.
    """
    if this_process.agent.watches or not os.environ.keys() & {"TORCHELASTIC_RUN_ID", "CROSS_SIZE"}:
        return  # under `launch` the agent sees to it
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    started_by = processes.parent(launcher)
    gone = launcher == 1 and not any(
        "python" in word for word in processes.command(1)
    )  # in a container it may be the first
    if gone:  # before we asked
        os.kill(os.getpid(), signal.SIGKILL)
    words = {word.rpartition("/")[2] for word in processes.command(started_by)}
    if "CROSS_SIZE" in os.environ and words & {"deepspeed", "ds"}:

        def watch() -> None:
            while processes.parent(launcher) == started_by:  # a process that lost its parent is given another
                time.sleep(1)
            os.kill(os.getpid(), signal.SIGTERM)  # SIGTERM may have ended only `deepspeed`: no step is lost by it

        threading.Thread(target=watch, daemon=True).start()


def owner(end: socket.socket) -> int:
    """User id of whoever is at the other end of a Unix socket: a name in the abstract space is anybody's to take."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]
