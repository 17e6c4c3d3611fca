"""The process that an output directory's owner file names, which may be another host's: does it live? (owner.py)"""

import fcntl
import os
import secrets
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from ...errors import UserError
from ..host import files

# Seconds without a touch of the file after which its owner is dead: while its lock is there, and when that is gone.
DEAD, DEAD_UNLOCKED = 60.0, 10.0


def lives(path: Path, file: IO[bytes], owner: str, locked: bool | None, beat: float) -> bool:
    """Whether the owner whom the file names is there. Of another host: whether it touches the file while we look. Also where we
    have the lock, which a host may keep to itself (NFS mounted with nolock)."""
    host, pid, *beats = owner.split() if len(owner.split()) > 1 else (owner, "")
    if host == socket.gethostname() and pid != str(os.getpid()):
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
        time.sleep(min(1.0, beat / 5))
        try:
            with files.opened(path) as again:  # opened anew, NFS asks its server
                if os.fstat(again.fileno()).st_mtime_ns != seen:
                    return True
        except FileNotFoundError:  # it has ended
            return False
    print(f"{path.parent}: no sign of process {pid} on {host}: this run takes the directory over", file=sys.stderr)
    return False


def set_aside(path: Path, file: IO[bytes]) -> None:
    """Remove the file of a dead owner, whose lock its file system keeps; unless somebody else has just done that."""
    aside = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        path.rename(aside)
        if os.path.samestat(aside.stat(), os.fstat(file.fileno())):
            aside.unlink()
        else:
            aside.rename(path)


def holder(path: Path) -> dict[str, str | int | None] | None:
    """{"host", "pid"} of the process that runs in a directory now; None: nobody, as far as locks, this host's processes and the
    last beat tell. Asks, and takes nothing. Not for the owner itself: closing the file would let go of its lock."""
    with suppress(OSError), files.opened(path) as file:
        host, _, rest = file.read(files.LINE).decode(errors="replace").partition(" ")
        pid = rest.partition(" ")[0]
        try:
            asked = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
            held = struct.unpack("hhqqi4x", asked)[0] != fcntl.F_UNLCK
        except OSError:  # no locks here
            recent = abs(time.time() - os.fstat(file.fileno()).st_mtime) < DEAD
            held = _runs_here(host, pid) if host == socket.gethostname() else recent
        if held:
            return {"host": host, "pid": int(pid) if pid.isdecimal() else None}
    return None


def _runs_here(host: str, pid: str) -> bool:
    return (
        host == socket.gethostname() and pid.isdecimal() and int(pid) != os.getpid() and Path(f"/proc/{pid}").exists()
    )


def taken(directory: Path, owner: str) -> UserError:
    """The error of a directory that another process owns."""
    host, _, rest = owner.partition(" ")
    pid = rest.partition(" ")[0]
    problem = f"another run is using it: process {pid or 'unknown'} on {host or 'a host that is starting'}"
    cure = f"wait for its end, or let it save and stop (touch {directory}/stop); or give this run another --output_dir"
    return UserError(str(directory), problem, cure, "passing")  # of an attempt that ends, as often as not
