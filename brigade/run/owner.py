"""One run at a time in an output directory: two would both train into it, and both claim success.

The owner holds a lock of the file system, and touches the file every few seconds. On a file system without locks, and where
one keeps the lock of a host that was switched off, another host goes by that: by what it sees change, not by any clock.
"""

import errno
import fcntl
import os
import secrets
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError

FILE = ".owner"  # "HOST PID beats" of who runs here, locked as long as it runs
BEAT = 4.0  # seconds between two touches of the owner
DEAD, DEAD_UNLOCKED = (
    60.0,
    10.0,
)  # seconds without one after which it is dead: while its lock is there, and when that is gone
_NOW_YOURS = "another run has taken this directory over, for nothing was seen of this one for {:.0f} s: {}"


class Owned:
    """The file that makes this process the only one to run in a directory."""

    def __init__(self, file: Any, path: Path) -> None:
        self.file, self.path, self.released = file, path, threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self.released.wait(BEAT):
            try:
                os.utime(self.file.fileno())
                mine = os.path.samestat(self.path.stat(), os.fstat(self.file.fileno()))
            except FileNotFoundError:  # with --fresh the directory has moved, and whoever moved it holds another file
                continue
            except (OSError, ValueError):  # a file system that is away comes back, or fails the run elsewhere
                continue
            if not mine and not self.released.is_set():
                print(_NOW_YOURS.format(DEAD, self.path.parent), file=sys.stderr, flush=True)
                os._exit(1)


def take(directory: Path) -> Owned:
    """Own the directory; the system unlocks it when this process ends, however it ends.

    Raises UserError where another process, of any host, runs there; OSError where nothing can be written.

    By fcntl and not flock, whose locks the processes that load data would inherit.
    """
    path, owner = directory / FILE, f"{socket.gethostname()} {os.getpid()} beats"
    while True:
        file = path.open("a+")
        locked = _lock(file)
        file.seek(0)
        before = file.read()
        lives = locked is False if not before else before != owner and _lives(path, file, before, locked)
        if not lives and locked:  # looking at the file has let go of the lock: fcntl
            locked = _lock(file)
        if lives:
            file.close()
            raise _taken(directory, before)
        if locked is False:  # of a dead host
            _set_aside(path, file)
        with suppress(OSError):
            if locked is not False and os.path.samestat(
                path.stat(), os.fstat(file.fileno())
            ):  # else it was removed just now
                break
        file.close()
    file.truncate(0)
    file.write(owner)
    file.flush()
    if locked is None:
        print(f"{directory} has no file locks: its owner is known by the file {FILE} alone", file=sys.stderr)
        time.sleep(BEAT / 2)  # two that came at once: the one that wrote last stays
        if (now := path.read_text()) != owner:
            file.close()
            raise _taken(directory, now)
    return Owned(file, path)


def release(owned: Owned | None, directory: Path) -> None:
    """Give back what take() returned, None included."""
    if owned:
        owned.released.set()
        (directory / FILE).unlink(missing_ok=True)
        owned.file.close()


def holder(directory: Path) -> dict[str, Any] | None:
    """{"host", "pid"} of the process that runs in a directory now; None: nobody, as far as locks, this host's processes and the
    last beat tell. Asks, and takes nothing. Not for the owner itself: closing the file would let go of its lock."""
    with suppress(OSError), (directory / FILE).open("r+") as file:
        host, _, rest = file.read().partition(" ")
        pid = rest.partition(" ")[0]
        try:
            asked = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
            held = struct.unpack("hhqqi4x", asked)[0] != fcntl.F_UNLCK
        except OSError:  # no locks here
            recent = abs(time.time() - os.fstat(file.fileno()).st_mtime) < DEAD
            held = _runs_here(host, pid) if host == socket.gethostname() else recent
        if held:
            return {"host": host, "pid": int(pid) if pid.isdigit() else None}
    return None


def _lock(file: Any) -> bool | None:
    """Whether this process has the file's lock now; None on a file system without locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def _lives(path: Path, file: Any, owner: str, locked: bool | None) -> bool:
    """Whether the owner whom the file names is there. Of another host: whether it touches the file while we look. Also where we
    have the lock, which a host may keep to itself (NFS mounted with nolock)."""
    host, pid, *beats = owner.split()
    if host == socket.gethostname():
        return locked is False or (locked is None and _runs_here(host, pid))
    if not beats:  # of an earlier version, which touches nothing
        return locked is False
    most = DEAD if locked is False else DEAD_UNLOCKED
    seen, until = os.fstat(file.fileno()).st_mtime_ns, time.monotonic() + most
    print(
        f"{path.parent} is owned by process {pid} on {host}: waiting up to {most:.0f} s for a sign of it",
        file=sys.stderr,
    )
    while time.monotonic() < until:
        time.sleep(min(1.0, BEAT / 5))
        try:
            with path.open() as again:  # opened anew, NFS asks its server
                if os.fstat(again.fileno()).st_mtime_ns != seen:
                    return True
        except FileNotFoundError:  # it has ended
            return False
    print(f"{path.parent}: no sign of process {pid} on {host}: this run takes the directory over", file=sys.stderr)
    return False


def _set_aside(path: Path, file: Any) -> None:
    """Remove the file of a dead owner, whose lock its file system keeps; unless somebody else has just done that."""
    aside = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        path.rename(aside)
        if os.path.samestat(aside.stat(), os.fstat(file.fileno())):
            aside.unlink()
        else:
            aside.rename(path)


def _runs_here(host: str, pid: str) -> bool:
    return host == socket.gethostname() and pid.isdigit() and int(pid) != os.getpid() and Path(f"/proc/{pid}").exists()


def _taken(directory: Path, owner: str) -> UserError:
    host, _, rest = owner.partition(" ")
    pid = rest.partition(" ")[0]
    problem = f"another run is using it: process {pid or 'unknown'} on {host or 'a host that is starting'}"
    cure = "wait for its end, or stop it there (kill), and start again; or give this run another --output_dir"
    return UserError(str(directory), problem, cure)
