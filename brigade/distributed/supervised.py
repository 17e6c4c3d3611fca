"""A rank that `launch` started: its first process watches over a second, in which train.py goes on.

The launchers (torchrun, deepspeed, accelerate) are the parents of ranks and tell how one ended in 40 lines or not at all.
Here the parent of the training process is ours: it hands every line, exit code and signal to the host's agent, through a
socket that BRIGADE_DOOR names. When the agent is gone, so is the rank: nothing is left behind on the host.
"""

import ctypes
import faulthandler
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

DOOR = "BRIGADE_DOOR"
PR_SET_PDEATHSIG = 1
_notes: int | None = None  # where this process writes what the agent should know


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
        _watch(child, agent, out, notes, wake)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    agent.close()
    for end in (out, notes, wake, wake_end):
        os.close(end)
    _train_here(out_end, notes_end)


def end_with_launcher() -> None:
    """Under torchrun, accelerate or deepspeed: end this rank when the process that started it is gone, by a SIGKILL for
    example. It would train on unseen, into the directory where the user starts the run again.

    `deepspeed` starts a process that starts the ranks: of both. A rank that nothing launched outlives its shell.
    """
    if _notes is not None or not os.environ.keys() & {"TORCHELASTIC_RUN_ID", "CROSS_SIZE"}:
        return  # under `launch` the agent sees to it
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    started_by = _parent(launcher)
    if launcher == 1 and b"python" not in _command(1):  # gone before we asked; in a container it may be the first
        os.kill(os.getpid(), signal.SIGKILL)
    words = {word.rpartition(b"/")[2] for word in _command(started_by).split(b"\0")}
    if "CROSS_SIZE" in os.environ and words & {b"deepspeed", b"ds"}:
        threading.Thread(target=_end_with, args=(launcher, started_by), daemon=True).start()


def _end_with(launcher: int, started_by: int) -> None:
    while _parent(launcher) == started_by:  # a process that lost its parent is given another
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _parent(pid: int) -> int:
    """The process that started `pid`; 0 where there is none to see."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def owner(end: socket.socket) -> int:
    """User id of whoever is at the other end of a Unix socket: a name in the abstract space is anybody's to take."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]


def note(**what: Any) -> None:
    """Let the agent know something of this rank: told, follows, stage, marker. Without `launch`: nothing."""
    if _notes is not None:
        with suppress(OSError):
            os.write(_notes, json.dumps(what).encode() + b"\n")


def _train_here(out: int, notes: int) -> None:
    global _notes
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.set_inheritable(notes, False)
    _notes = notes
    # As a JVM does: what is it doing? The agent asks a rank that hangs.
    faulthandler.register(signal.SIGQUIT, all_threads=True)


def _watch(child: int, agent: socket.socket, out: int, notes: int, wake: int) -> NoReturn:
    """Hand on what the child says until it ends; end as it ended."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: os.kill(child, received))
    rank = int(os.environ["RANK"])
    _send(agent, rank=rank, pid=child)
    os.set_blocking(out, False)
    poll = select.poll()
    for source in (out, notes, wake, agent.fileno()):
        poll.register(source, select.POLLIN)
    heard: dict[int, bytes] = {out: b"", notes: b""}
    ended = status = 0
    while not ended:
        for source, _ in poll.poll():
            if source == wake:
                os.read(wake, 512)
                ended, status = os.waitpid(child, os.WNOHANG)
            elif source == agent.fileno():  # it never writes: this is its end
                os.kill(child, signal.SIGKILL)
                ended, status = os.waitpid(child, 0)
            elif not _hear(source, heard, agent, rank, out):
                poll.unregister(source)
    os.set_blocking(notes, False)
    for source in (out, notes):
        with suppress(BlockingIOError):
            while _hear(source, heard, agent, rank, out):
                pass
    if heard[out]:
        _send(agent, rank=rank, out=heard[out].decode(errors="replace"))
    code = os.waitstatus_to_exitcode(status)
    _send(agent, rank=rank, exit=code)
    agent.close()
    if code < 0:  # so that the launcher sees a signal too
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _hear(source: int, heard: dict[int, bytes], agent: socket.socket, rank: int, out: int) -> bool:
    """Read what is there, hand on whole lines; False at the end of the source."""
    chunk = os.read(source, 65536)
    *lines, heard[source] = (heard[source] + chunk).split(b"\n")
    if source == out:
        lines = [line.rpartition(b"\r")[2] for line in lines]  # of a progress bar its last state
        if b"\r" in heard[out] or len(heard[out]) > 65536:  # a bar that goes on, or output without lines
            lines.append(heard[out].rstrip(b"\r").rpartition(b"\r")[2])
            heard[out] = b""
        if lines:
            _send(agent, rank=rank, out=b"\n".join(lines).decode(errors="replace"))
    else:
        for line in lines:
            _send(agent, rank=rank, **json.loads(line))
    return bool(chunk)


def _send(agent: socket.socket, **what: Any) -> None:
    with suppress(OSError):  # its end is noticed by poll
        agent.sendall(json.dumps(what).encode() + b"\n")
