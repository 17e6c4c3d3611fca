"""One run at a time in an output directory: two would both train into it, and both claim success."""

import errno
import fcntl
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError

FILE = ".owner"  # "HOST PID" of who runs here, locked as long as it runs


def take(directory: Path) -> Any:
    """The open file that makes this process the only one to run in a directory; the system unlocks it when that ends, however
    it ends. Raises UserError where another process, of any host, runs there; OSError where nothing can be written.

    By fcntl and not flock, whose locks the processes that load data would inherit. A file system without locks is asked
    for the process that the file names.
    """
    path = directory / FILE
    while True:
        file = path.open("a+")
        file.seek(0)
        host, _, pid = file.read().partition(" ")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            busy = False
        except OSError as error:
            here = host == socket.gethostname() and pid.isdigit() and int(pid) != os.getpid()
            busy = error.errno in (errno.EACCES, errno.EAGAIN) or (here and Path(f"/proc/{pid}").exists())
            if not busy:
                lacking = f"{directory} has no file locks: a second run from another host would not be noticed"
                print(lacking, file=sys.stderr)
        if busy:
            file.close()
            problem = f"another run is using it: process {pid or 'unknown'} on {host or 'a host that is starting'}"
            cure = "wait for its end, or end it there (kill), and start again; or give this run another --output_dir"
            raise UserError(str(directory), problem, cure)
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):  # its last owner may just have removed it
                break
        file.close()
    file.truncate(0)
    file.write(f"{socket.gethostname()} {os.getpid()}")
    file.flush()
    return file


def release(owned: Any, directory: Path) -> None:
    """Give back what take() returned, None included."""
    if owned:
        (directory / FILE).unlink(missing_ok=True)
        owned.close()
