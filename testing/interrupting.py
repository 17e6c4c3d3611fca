"""Worker of test_saving.py: train.py on ranks of which one is killed, or has no disk any more, while a checkpoint is saved.

python -m testing.ranks starts it: testing.interrupting WHEN FLAG..., WHEN a name in INTERRUPTIONS
"""

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import train
from brigade.train.checkpoint import saving
from brigade.train.checkpoint.uploads import Uploads
from brigade.train.distributed import ranks
from brigade.train.host import storage
from brigade.train.host.cluster import world_from_environment
from brigade.train.step.trainer import Trainer

STEP = 4  # whose checkpoint it is: the second


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def disk_is_full(path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def after(owner: Any, name: str, then: Callable[[Any], None]) -> None:
    """Call `then` with a function's last argument after each call that is about this checkpoint."""
    whole = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        found = whole(*args, **options)
        if f"checkpoint-{STEP}" in str(args[-1]):
            then(args[-1])
        return found

    setattr(owner, name, wrapped)


def while_loading() -> None:
    Trainer._load_optimizer_and_scheduler = die


def while_uploading() -> None:
    """Die in the middle of the second file of the checkpoint: half of it is sent, and no end of it.

    Each checkpoint waits for the upload of the one before: on a busy host the next one could take this one's place.
    """
    whole, begun, add = storage._Arrow._copy_in, [], Uploads.add

    def copy_in(self: Any, file: Any, name: str) -> None:
        if f"checkpoint-{STEP}/" in name:
            begun.append(name)
        if len(begun) == 2:
            stream = self.system.open_output_stream(self._path(name), compression=None)
            stream.write(file.read(-(-os.fstat(file.fileno()).st_size // 2)))
            die()
        whole(self, file, name)

    def add_alone(self: Any, checkpoint: Path) -> None:
        self.wait()
        add(self, checkpoint)

    storage._Arrow._copy_in, Uploads.add = copy_in, add_alone  # type: ignore[method-assign]


INTERRUPTIONS = {  # when -> (rank, how)
    "copying": (1, lambda: after(saving, "_bring", die)),
    "disk full": (1, lambda: after(saving, "_bring", disk_is_full)),
    "elsewhere": (1, lambda: after(saving, "_bring", Path.unlink)),  # as a host that sees another directory writes
    "closing": (0, lambda: after(saving, "_sync", die)),
    "loading": (1, while_loading),
    "uploading": (0, while_uploading),
    "never": (0, lambda: None),
}


def main() -> None:
    rank, interrupt = INTERRUPTIONS[sys.argv[1]]
    if world_from_environment().rank == rank:
        interrupt()
    train.main(sys.argv[2:])


if __name__ == "__main__":
    ranks.run_to_the_end(main)
