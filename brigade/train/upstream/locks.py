"""torch's lock of a kernel that is being compiled (torch/utils/file_baton.py): it ends with who holds it."""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.file_baton import FileBaton

LOCAL = {"btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs"}  # where all see each other's locks
HOURS = 1  # after which any other lock is nobody's: a kernel takes minutes
LOCKED = b"flock\n"  # what the file of a holder who has it locked says


def end_with_their_holder() -> None:
    """Let torch's lock of a kernel (FileBaton) end with its holder, for this process and those that it forks.

    torch only makes a file and removes it; who is killed leaves it. Here the holder has the file locked by the operating system
    too, which every process sees, in whatever pid namespace, and which ends with the holder.
    """
    from torch.utils.file_baton import FileBaton

    FileBaton.try_acquire, FileBaton.release = _acquire, _release  # type: ignore[method-assign]


def _acquire(self: "FileBaton") -> bool:
    _remove_left_over(Path(self.lock_file_path))
    try:
        self.fd = os.open(self.lock_file_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    with suppress(OSError):  # a file system without locks: then only age tells
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        os.write(self.fd, LOCKED)
    return True


def _release(self: "FileBaton") -> None:
    with suppress(FileNotFoundError):  # an older Brigade removed what it took for left over
        Path(self.lock_file_path).unlink()
    os.close(self.fd)  # after its file: an unlocked one is anybody's to remove


def _remove_left_over(lock: Path) -> None:
    """Remove a lock whose holder is gone: it was locked, on a file system where that shows, and is no more; or it is old."""
    with suppress(OSError), lock.open("r+b") as file:  # there is none; its holder is alive; it is another user's
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen = os.fstat(file.fileno())
        ended = file.read() == LOCKED and _is_local(lock)
        # Meanwhile another may have removed this one and made the next.
        if (ended or seen.st_mtime < time.time() - HOURS * 3600) and os.path.samestat(seen, lock.stat()):
            lock.unlink()


def _is_local(path: Path) -> bool:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = [(len(point), kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return max(around)[1] in LOCAL
