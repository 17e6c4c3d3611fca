"""What brings a run to object storage behind its training: checkpoints one at a time, their manifests last, and at the end all
that the run leaves (remote.py says what lies where)."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import UserError
from .. import storage
from ..distributed import heartbeat, stop
from ..run import directory as runs
from ..run import events, owner, starts
from ..run.leftovers import SAVING
from . import manifest

PAUSES = (1.0, 4.0, 15.0, 60.0)  # seconds before each further try of a request that failed
MARKERS = (runs.SUCCESS, runs.STOPPED)  # uploaded last, as they speak of all the rest
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_OWN = (owner.FILE, starts.FILE, stop.FILE, SAVING, heartbeat.FOLDER, "nvme_offload")  # of this host


def is_record(name: str) -> bool:
    """Whether an object of a run is no part of a checkpoint and holds no weights."""
    first = name.partition("/")[0]
    return (
        not first.startswith(("checkpoint-", ".", "replica-"))
        and not name.endswith(WEIGHTS)
        and ".." not in name.split("/")
    )


def best_of(checkpoint: Path) -> int | None:
    """Return the step of the best checkpoint so far, as the state in a checkpoint names it; None where it names none."""
    with suppress(OSError, ValueError, AttributeError):
        named = json.loads((checkpoint / runs.STATE).read_text()).get("best_model_checkpoint")
        return runs.step_of(Path(named)) if named else None
    return None


def _is_own(path: Path) -> bool:
    """Whether it is a file and no link, which others may have made."""
    return path.is_file() and not path.is_symlink()


class Uploads:
    """Uploads the checkpoints of a run, one at a time, and at its end all that it leaves.

    late: the newest checkpoint that could not be uploaded, and why
    """

    def __init__(self, remote: storage.Storage, directory: Path, limit: int | None) -> None:
        """limit: save_total_limit"""
        self.storage, self.directory, self.limit = remote, directory, limit
        self.late: tuple[Path, UserError] | None = None
        self._waiting: Path | None = None
        self._current: Path | None = None
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of the files of which it has told
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, checkpoint: Path) -> None:
        """Upload a whole checkpoint in the background, after the one that is being uploaded, instead of one that waits."""
        with self._changed:
            self._waiting = checkpoint
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()

    def add_newest(self) -> None:
        """Upload the newest whole checkpoint of the directory, unless it is there."""
        if newest := self._newest():
            self.add(newest)

    def holds(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is being uploaded, or waits for that: it may not be removed yet."""
        with self._changed:
            return checkpoint in (self._current, self._waiting)

    def wait(self, limit: float | None = None) -> None:
        """Wait until nothing is left to upload, at most `limit` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and self._current is None, limit)

    def finish(self) -> None:
        """Upload what is missing, the run's own files, and last the marker of its end. Raise UserError where that fails."""
        began = time.perf_counter()
        self.wait()
        try:
            if self.late and (newest := self._newest()):
                self._upload_with_best(newest)
            self._put_all()
        except Exception as error:
            known = storage.explained(error, self.storage.url)
            problem = f"what the run has left is not all there: {known.problem}"
            cure = f"{known.cure}; everything lies in {self.directory}: the same command uploads the rest"
            raise UserError(self.storage.url, problem, cure, known.whose, code=1) from None
        print(f"Uploaded to {self.storage.url}: {time.perf_counter() - began:.1f} s at the end.", flush=True)

    def put_records(self) -> None:
        """Upload what tells of the run, without weights and markers, as far as it has changed since."""
        names = [name for name in self._own_files() if is_record(name) and name not in MARKERS]
        about = {name: (self.directory / name).stat() for name in names}
        stamps = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in about.items()}
        changed = [name for name in names if self._sent.get(name) != stamps[name]]
        self._put([((self.directory / name).read_bytes(), name) for name in changed])  # of now: some grow meanwhile
        self._sent |= stamps

    # ---- in the background -------------------------------------------------------------------------------------------
    def _work(self) -> None:
        while True:
            with self._changed:
                self._current = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting is not None)
                assert self._waiting
                checkpoint = self._current = self._waiting
                self._waiting = None
            try:
                self._upload_with_best(checkpoint)
                self.put_records()
                self.late = None
            except Exception as error:
                known = storage.explained(error, self.storage.url)
                self.late = checkpoint, known
                text = f"warning: {checkpoint.name} could not be uploaded: {known.problem}. Training goes on"
                print(f"{text}; the next checkpoint is tried anew", file=sys.stderr, flush=True)
                step = runs.step_of(checkpoint)
                events.add(self.directory, "upload failed", step=step, text=known.problem)

    def _newest(self) -> Path | None:
        return next((path for path in runs.checkpoints(self.directory) if manifest.flaw(path) is None), None)

    def _upload_with_best(self, checkpoint: Path) -> None:
        """Upload a checkpoint, and the best one, whose place a newer one may have taken while it waited; remove too many."""
        step = best_of(checkpoint)
        self._upload(checkpoint)
        best = checkpoint.with_name(f"checkpoint-{step}")
        if best != checkpoint and manifest.finished(best):
            self._upload(best)
        self._rotate(runs.step_of(checkpoint), step)

    def _upload(self, checkpoint: Path) -> None:
        """Upload a whole checkpoint, its manifest last, unless it is there."""
        began, name = time.perf_counter(), checkpoint.name
        text = (checkpoint / manifest.RECORD).read_bytes()
        files = manifest.sizes(manifest.recorded(checkpoint))
        there = self._again(self.storage.sizes)
        head = f"{name}/{manifest.RECORD}"
        complete = all(there.get(f"{name}/{file}") == size for file, size in files.items())
        if head in there and complete and self._again(self.storage.read, head) == text:
            return
        # One of the same step: without its manifest it is none any more, and then its files may change.
        self._again(self.storage.remove, [head] if head in there else [])
        self._put([(checkpoint / file, f"{name}/{file}") for file in files])
        self._put([(checkpoint / manifest.RECORD, head)])
        seconds, size = round(time.perf_counter() - began, 3), sum(files.values())
        events.add(self.directory, "upload", step=runs.step_of(checkpoint), seconds=seconds, bytes=size)

    def _rotate(self, newest: int, best: int | None) -> None:
        """Remove checkpoints beyond save_total_limit, as Saving does here, and what was cut while it was uploaded."""
        there = self._again(self.storage.sizes)
        steps: dict[int, list[str]] = {}
        for name in there:
            folder = name.partition("/")[0]
            if "/" in name and folder.startswith("checkpoint-") and folder.removeprefix("checkpoint-").isdecimal():
                steps.setdefault(int(folder.removeprefix("checkpoint-")), []).append(name)
        kept = {newest} | ({best} if best is not None else set())
        room = sys.maxsize if self.limit is None else self.limit - len(kept & steps.keys())
        for step in sorted(steps.keys() - kept, reverse=True):
            head = f"checkpoint-{step}/{manifest.RECORD}"
            if head in there and (room > 0 or step > newest):
                room -= 1
                continue
            self._again(self.storage.remove, [head] if head in there else [])  # its name first, as it were
            self._again(self.storage.remove, [name for name in steps[step] if name != head])

    def _put_all(self) -> None:
        """Upload everything but checkpoints, markers last."""
        names = [name for name in self._own_files() if name not in MARKERS]
        self._put([(self.directory / name, name) for name in names if not is_record(name)])
        self.put_records()
        self._put([(self.directory / name, name) for name in MARKERS if (self.directory / name).is_file()])

    def _own_files(self) -> list[str]:
        """Return the names of the files that the run leaves besides checkpoints."""
        names = []
        for path in sorted(self.directory.iterdir()):
            if path.name in _OWN or path.name.startswith(("checkpoint-", ".", "replica-")):
                continue
            inner: Iterable[Path] = path.rglob("*") if path.is_dir() else (path,)
            names += [str(file.relative_to(self.directory)) for file in sorted(inner) if _is_own(file)]
        return names

    def _put(self, contents: list[tuple[Path | bytes, str]]) -> None:
        if self.storage.url.startswith("hf://"):  # one commit
            self._again(self.storage.put, contents)
            return
        for each in contents:
            self._again(self.storage.put, [each])

    def _again(self, request: Callable[..., Any], *about: Any) -> Any:
        """Return what a request to the storage returns, which is tried again where it fails; not where a file is gone here."""
        for pause in PAUSES:
            try:
                return request(*about)
            except FileNotFoundError:
                raise
            except Exception:
                time.sleep(pause)
        return request(*about)
