"""One run at a time in an output directory: two would both train into it, and both claim success.

The owner holds a lock of the file system, and touches the file every few seconds. On a file system without locks, and where
one keeps the lock of a host that was switched off, another host goes by that: by what it sees change, not by any clock.
"""

import errno
import fcntl
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from ..host import files
from . import other_owner

FILE = ".owner"  # "HOST PID beats" of who runs here, locked as long as it runs
BEAT = 4.0  # seconds between two touches of the owner
_NOW_YOURS = "another run has taken this directory over, for nothing was seen of this one for long: {}"


class Owned:
    """The file that makes this process the only one to run in a directory."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
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
                print(_NOW_YOURS.format(self.path.parent), file=sys.stderr, flush=True)
                os._exit(1)

    def release(self, directory: Path) -> None:
        """Let another process have the directory that the file lies in now. A second time it does nothing."""
        self.released.set()
        if not self.file.closed:
            (directory / FILE).unlink(missing_ok=True)
            self.file.close()


def take(directory: Path) -> Owned:
    """Own the directory; the system unlocks it when this process ends, however it ends.

    Raise UserError where another process, of any host, runs there; OSError where nothing can be written.

    By fcntl and not flock, whose locks the processes that load data would inherit.
    """
    path, owner = directory / FILE, f"{socket.gethostname()} {os.getpid()} beats"
    while True:
        file = files.append(path, also_read=True)
        locked = _lock(file)
        file.seek(0)
        before = file.read(files.LINE).decode(errors="replace")
        lives = locked is False and not before  # it has not written its name yet
        # A name like ours is our own of before, unless another has the lock: in a container of its own, where numbers repeat.
        if before and (before != owner or locked is False):
            lives = other_owner.lives(path, file, before, locked, BEAT)
        if lives:
            file.close()
            raise other_owner.taken(directory, before)
        # Looking at the file has let go of the lock (fcntl), and somebody may have it now.
        if locked and _lock(file) is False:
            file.close()
            continue
        if locked is False:  # of a dead host
            other_owner.set_aside(path, file)
        with suppress(OSError):
            # Its last owner may just have removed it.
            if os.path.samestat(path.stat(), os.fstat(file.fileno())) and locked is not False:
                break
        file.close()
    file.truncate(0)
    file.write(owner.encode())
    if locked is None:
        print(f"{directory} has no file locks: its owner is known only by the file {FILE}", file=sys.stderr)
        time.sleep(BEAT / 2)  # two that came at once: the one that wrote last stays
        now = files.read_text(path, files.LINE, "replace")
        if now != owner:
            file.close()
            raise other_owner.taken(directory, now)
    return Owned(file, path)


def _lock(file: IO[bytes]) -> bool | None:
    """Whether this process has the file's lock now; None on a file system without locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True
