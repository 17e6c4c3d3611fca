"""What brings a run to object storage while it trains: checkpoints one at a time, their manifests last, and at the end all
that the run leaves (remote.py says what lies where)."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from ...errors import UserError
from ...errors.tables import Document
from ..distributed import heartbeat, stop
from ..host import files, storage
from ..run import directory as runs
from ..run import events, on_disk, owner, starts
from ..run.on_disk import SAVING
from ..run.success import SUCCESS
from ..upstream.unpickling import is_inside
from . import manifest

PAUSES = (1.0, 4.0, 15.0, 60.0)  # seconds before each further try of a request that failed
MARKERS = (SUCCESS, runs.STOPPED)  # uploaded last, as they speak of all the rest
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
T = TypeVar("T")
_OWN = (owner.FILE, starts.FILE, stop.FILE, SAVING, heartbeat.FOLDER, "nvme_offload")  # of this host


def is_record(name: str) -> bool:
    """Whether an object of a run is not part of a checkpoint and holds no weights."""
    first = name.partition("/")[0]
    return (
        not first.startswith(("checkpoint-", ".", "replica-"))
        and not name.endswith(WEIGHTS)
        and ".." not in name.split("/")
    )


def best_of(checkpoint: Path) -> int | None:
    """Return the step of the best checkpoint so far, as the state in a checkpoint names it; None where it names none."""
    with suppress(OSError, ValueError, AttributeError):
        state = json.loads((checkpoint / on_disk.STATE).read_text())
        named, step = state.get("best_model_checkpoint"), state.get("best_global_step")
        if named:
            return step if isinstance(step, int) else on_disk.named_step(named)
    return None


@dataclass(frozen=True)
class There(on_disk.Found):
    """A checkpoint in object storage. record: its manifest; None where it is not whole"""

    record: Document | None


def checkpoints_there(there: Mapping[str, int], read: Callable[[str], bytes]) -> list[There]:
    """Every checkpoint-N in a storage, newest first by the steps of their manifests, as on_disk.checkpoints() has those of a
    directory: there, too, one may have been renamed or copied.

    there: {name of an object: bytes}; read: returns an object's content, and raises OSError only for one that is not there
    """
    found, read = {}, cache(read)  # each manifest is a request, and says both its step and what is whole
    for folder in {name.partition("/")[0] for name in there if "/" in name}:
        if on_disk.is_named(folder):
            step = on_disk.recorded_step(folder, partial(_read_small, there, read, folder))
            record = _whole_record(there, read, folder)
            found[folder] = There(folder, step, record is not None, record)
    return [found[name] for name in on_disk.newest_first({name: each.step for name, each in found.items()})]


def _read_small(there: Mapping[str, int], read: Callable[[str], bytes], folder: str, file: str) -> bytes:
    name = f"{folder}/{file}"
    if there.get(name, files.MOST + 1) > files.MOST:
        raise FileNotFoundError(name)
    return read(name)


def _whole_record(there: Mapping[str, int], read: Callable[[str], bytes], folder: str) -> Document | None:
    """Return the manifest of a checkpoint of which every file is there with its size; else None."""
    with suppress(OSError, ValueError, RecursionError):  # there is none of ours
        record = manifest.parsed(_read_small(there, read, folder, manifest.RECORD).decode())
        sizes, folders = manifest.sizes(record), record.get("folders", ())
        inside = all(map(is_inside, (*sizes, *folders)))
        if inside and all(there.get(f"{folder}/{file}") == size for file, size in sizes.items()):
            return record
    return None


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
        newest = self._newest()
        if newest:
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
            newest = self._newest() if self.late else None
            if newest:
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
                step = on_disk.step_of(checkpoint)
                events.add(self.directory, "upload failed", step=step, text=known.problem)

    def _newest(self) -> Path | None:
        return next((path for path in on_disk.checkpoints(self.directory) if manifest.flaw(path) is None), None)

    def _upload_with_best(self, checkpoint: Path) -> None:
        """Upload a checkpoint, and the best one, whose place a newer one may have taken while it waited; remove too many."""
        step = best_of(checkpoint)
        newest = self._upload(checkpoint)
        best = on_disk.whole_checkpoints(self.directory).get(-1 if step is None else step, checkpoint)
        if best != checkpoint:
            self._upload(best)
        self._rotate(newest, step)

    def _upload(self, checkpoint: Path) -> str:
        """Upload a whole checkpoint, its manifest last, unless it is there. Return its name there: its step's, whatever the
        directory is called."""
        began, step = time.perf_counter(), on_disk.step_of(checkpoint)
        name = f"checkpoint-{step}"
        text = (checkpoint / manifest.RECORD).read_bytes()
        sizes = manifest.sizes(manifest.recorded(checkpoint))
        there = self._again(self.storage.sizes)
        head = f"{name}/{manifest.RECORD}"
        complete = all(there.get(f"{name}/{file}") == size for file, size in sizes.items())
        if head in there and complete and self._again(self.storage.read, head) == text:
            return name
        # One of the same step: without its manifest it is none any more, and then its files may change.
        self._again(self.storage.remove, [head] if head in there else [])
        self._put([(checkpoint / file, f"{name}/{file}") for file in sizes])
        self._put([(checkpoint / manifest.RECORD, head)])
        seconds, size = round(time.perf_counter() - began, 3), sum(sizes.values())
        events.add(self.directory, "upload", step=step, seconds=seconds, bytes=size)
        return name

    def _rotate(self, newest: str, best: int | None) -> None:
        """Remove checkpoints beyond save_total_limit, as Saving does here, and what was cut while it was uploaded."""
        there = self._again(self.storage.sizes)
        gone = {name.partition("/")[0] for name in there if on_disk.is_named(name.partition("/")[0])}
        gone = {name for name in gone if f"{name}/{manifest.RECORD}" not in there}
        if self.limit is not None:
            found = checkpoints_there(there, partial(self._again, self.storage.read))
            names = [each.name for each in found if each.step == best]
            gone.update(on_disk.beyond(self.limit, found, newest, names[0] if names else None))
        for folder in sorted(gone):
            head = f"{folder}/{manifest.RECORD}"
            self._again(self.storage.remove, [head] if head in there else [])  # its name first, as it were
            self._again(self.storage.remove, [name for name in there if name.startswith(f"{folder}/") and name != head])

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
            names += [
                str(file.relative_to(self.directory))
                for file in sorted(inner)
                if file.is_file() and not file.is_symlink()
            ]
        return names

    def _put(self, contents: list[tuple[Path | bytes, str]]) -> None:
        if self.storage.url.startswith("hf://"):  # one commit
            self._again(self.storage.put, contents)
            return
        for each in contents:
            self._again(self.storage.put, [each])

    def _again(self, request: Callable[..., T], *about: object) -> T:
        """Return what a request to the storage returns. It is tried again where it fails, unless a file here is gone. Raise a
        UserError that says how long it was tried."""
        began = time.monotonic()
        for pause in PAUSES:
            try:
                return request(*about)
            except FileNotFoundError:
                raise
            except Exception:
                time.sleep(pause)
        try:
            return request(*about)
        except Exception as error:
            known = storage.explained(error, self.storage.url)
            tried = f"tried {len(PAUSES) + 1} times within {time.monotonic() - began:.0f} s"
            raise replace(known, problem=f"{known.problem} ({tried})") from error
