"""Saving a checkpoint so that it is whole or absent, while training waits only until its files are in host memory.

The engines write all files into a stage, one on each host: in /dev/shm where there is room, else on the disk. From there a
thread of each rank brings its share to OUTPUT/.saving/checkpoint-N, with a checksum, and syncs it to the disk. One rank waits
until it sees all files of all shares there, writes the manifest and gives the directory its name, `OUTPUT/checkpoint-N`. So
whoever looks finds all or nothing, even if a host dies or loses sight of the directory. The threads talk through torch's store,
not by collectives, whose order would differ between ranks. Where hosts have output directories of their own, all this happens on
each.
"""

import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

import xxhash
from torch.utils import serialization

from ...errors import UserError, whose
from ...errors.disk import of_disk
from ...errors.tables import Document, Fields
from ..distributed import ranks
from ..distributed.exchange import Board, board
from ..host import files
from ..run import directory as runs
from ..run import events, mark, on_disk
from ..run.on_disk import REPLACED, SAVING
from . import manifest, memory_stage

TELLING = 2.0  # seconds in which the rank that failed may say so first
SEEN = 10.0  # seconds in which a network file system should show a file that another host has written and synced
GRACE = 30.0  # seconds for finishing a checkpoint while the run ends with an error
_BLOCK = 16 * 2**20
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # file systems that cannot sync a directory


@dataclass
class _Job:
    """One checkpoint on its way from the stage to its name."""

    step: int
    key: str  # in torch's store
    stage: Path
    sources: dict[str, BinaryIO | Path]  # this rank's share: open files that no longer have a name, or paths
    document: Fields
    best: Path | None
    began: float
    blocked: float = 0.0  # seconds
    in_memory: bool = False
    failure: Fields | None = None  # {"rank": where it failed, "error": a UserError's parts}


class Saving:
    """Saves the checkpoints of one run. blocked: seconds for which the last save() held this rank up"""

    def __init__(self, run: runs.Run, expected: int = 0) -> None:
        """expected: the most bytes that the first checkpoint may have on a host; 0: nobody knows"""
        self.run, self.world, self.blocked = run, run.world, 0.0
        given = ranks.gather((secrets.token_hex(8), run.world.host))
        # In torch's store, which may outlive a run: this and all other Savings of a process have names of their own.
        self._key, self._saves = f"brigade/checkpoint-{given[0][0]}", 0
        self.name = f"{given[0][0]}-{run.world.host}"
        self.hosts = [host for _, host in given]
        self.group = [rank for rank, (_, host) in enumerate(given) if run.shared or host == run.world.host]
        self.closers = (
            [0] if run.shared else list({host: rank for rank, (_, host) in reversed([*enumerate(given)])}.values())
        )
        self._on_host = expected  # then the bytes of the last checkpoint on this host
        self._memory: Path | None = None
        self._in_use: IO[str] | None = None
        self._thread: threading.Thread | None = None
        self._job: _Job | None = None

    def save(self, step: int, write: Callable[[Path], None], document: Fields, best: Path | None) -> None:
        """Write checkpoint-`step`. A collective, on the main thread.

        write: writes all files of this rank into a directory; document: as in manifest.write(); best: a checkpoint to keep
        Raises UserError where the previous one could not be written, and where this host sees another output directory.
        """
        began = time.perf_counter()
        self.wait()
        self.run.check_directory()
        stage, in_memory = self._stage(step)
        # Without the CRC-32 that torch.save computes: a quarter of its time when it writes to memory, and torch never reads it.
        with serialization.config.patch("save.compute_crc32", False):
            write(stage)
        ranks.barrier()
        lead = self.world.local_rank == 0
        listing = {str(p.relative_to(stage)): p.stat().st_size for p in stage.rglob("*") if p.is_file()} if lead else {}
        # ZeRO looks for its empty folders too.
        for folder in sorted(path for path in stage.rglob("*") if lead and path.is_dir()):
            (self._unnamed(step) / folder.relative_to(stage)).mkdir(exist_ok=True)
        mine = self._share(ranks.gather((self.world.host, listing)))
        sources: dict[str, BinaryIO | Path] = {name: stage / name for name in mine}
        if in_memory:  # without names: the memory is free when this process ends, however it ends
            sources = {name: (stage / name).open("rb", buffering=0) for name in mine}
            for name in mine:
                (stage / name).unlink()
        base = {"base": self.run.base, "run": runs.written(self.run.directory) if self._closes else None}
        self._saves += 1
        key = f"{self._key}-{self._saves}"
        self._job = _Job(step, key, stage, sources, document | base, best, began, in_memory=in_memory)
        self._job.blocked = self.blocked = time.perf_counter() - began
        self._thread = threading.Thread(target=self._settle, args=(self._job,), daemon=True)
        self._thread.start()
        if not self.run.settings.recipe.training.async_save:
            self.wait()
            self.blocked = time.perf_counter() - began

    def wait(self, limit: float | None = None) -> None:
        """Wait until the last checkpoint has its name, at most `limit` seconds. Raises UserError if it never got one."""
        if self._thread:
            self._thread.join(limit)
        failure = self._job.failure if self._job else None
        if failure and failure["rank"] != self.world.rank:
            time.sleep(TELLING)
            raise UserError(*failure["error"])
        self.check()

    def check(self) -> None:
        """Raise the UserError that the last checkpoint met in the background on this rank, which then reports it. The other ranks
        end with this one, or in wait()."""
        failure = self._job.failure if self._job else None
        if failure and failure["rank"] == self.world.rank:
            raise UserError(*failure["error"])

    def let_finish(self) -> None:
        """Give a checkpoint the time that it may still need before the run ends with another error."""
        with suppress(UserError):
            self.wait(GRACE)
        if self.run.uploads:
            self.run.uploads.wait(GRACE)

    # ---- on the main thread --------------------------------------------------------------------------------------
    @property
    def _closes(self) -> bool:
        return self.world.rank in self.closers

    def _unnamed(self, step: int) -> Path:
        """The directory in which a checkpoint lies until it is whole."""
        return self.run.directory / SAVING / f"checkpoint-{step}"

    def _stage(self, step: int) -> tuple[Path, bool]:
        """(this host's directory to write into, whether it is in memory). It is if all hosts have room for as much as the last
        checkpoint took, and before the first one for as much as it may take."""
        wanted = self.run.settings.recipe.training.async_save and self._on_host > 0
        fits = all(ranks.gather(bool(wanted) and self._on_host <= memory_stage.room()))
        if fits and self._memory is None:
            if self.world.local_rank == 0:
                self._in_use = memory_stage.make(self.name)
            ranks.barrier()
            self._memory = memory_stage.path(self.name)
        parent = self._memory if fits and self._memory else self.run.directory / SAVING
        stage = parent / f"stage-{step}-{self.world.host}"
        # Without parents: those of a directory that is gone would be made on another disk.
        for folder in (self.run.directory / SAVING, self._unnamed(step), stage):
            folder.mkdir(exist_ok=True)
        return stage, fits

    def _share(self, listings: list[tuple[str, dict[str, int]]]) -> list[str]:
        """The files of this host's stage that this rank brings to their place."""
        files = next((listing for host, listing in listings if listing and host == self.world.host), {})
        self._on_host = sum(files.values())
        return manifest.shares(files, self.world.local_size)[self.world.local_rank]

    # ---- in the background ---------------------------------------------------------------------------------------
    def _settle(self, job: _Job) -> None:
        """Bring this rank's share, close the checkpoint if this rank has to, and learn how it ended."""
        try:
            notes = board(self.world.size)
            notes.put(f"{job.key}/{self.world.rank}", self._brought(job))
            if self._closes:
                notes.put(f"{job.key}/closed-{self.world.rank}", self._close(job, notes))
            ended = [notes.get(f"{job.key}/closed-{closer}") for closer in self.closers]
            job.failure = next((end for end in ended if "error" in end), None)
        except BaseException as error:  # the store is gone, and with it rank 0
            job.failure = self._failed(error, job)
        if self.world.local_rank == 0:
            shutil.rmtree(job.stage, ignore_errors=True)
            with suppress(OSError):  # the last host's
                (self.run.directory / SAVING).rmdir()

    def _brought(self, job: _Job) -> Fields:
        target = self._unnamed(job.step)
        try:
            return {"files": {name: _bring(source, target / name) for name, source in job.sources.items()}}
        except BaseException as error:
            return self._failed(error, job)
        finally:
            for source in job.sources.values():
                if not isinstance(source, Path):
                    source.close()

    def _close(self, job: _Job, notes: Board) -> Fields:
        """Give the checkpoint its name when all parts are there, or return what failed."""
        files: dict[str, Fields] = {}
        writers: dict[str, int] = {}
        for rank in self.group:
            brought = notes.get(f"{job.key}/{rank}")
            if "error" in brought:
                return brought
            files |= brought["files"]
            writers |= dict.fromkeys(brought["files"], rank)
        directory, name = self.run.directory, f"checkpoint-{job.step}"
        target, final = self._unnamed(job.step), directory / name
        try:
            self.run.check_directory()
            unseen = self._unseen(job, files, writers)
            if unseen:
                return unseen
            folders = [path for path in target.rglob("*") if path.is_dir()]
            empty = [str(path.relative_to(target)) for path in folders if not any(path.iterdir())]
            manifest.write(target, job.document, files, empty)
            _sync(target / manifest.RECORD)
            for folder in {target, *folders}:
                _sync(folder)
            replaced = directory / SAVING / f"{name}{REPLACED}"
            if final.exists():  # it is damaged, or the run went back before its step
                final.rename(replaced)
            target.rename(final)
            _sync(directory)
            shutil.rmtree(replaced, ignore_errors=True)
            if self.run.uploads:
                self.run.uploads.add(final)
            self._rotate(final, job.best)
        except BaseException as error:
            return self._failed(error, job)
        if self.world.is_main_rank:
            size, seconds = sum(entry["bytes"] for entry in files.values()), time.perf_counter() - job.began
            blocked = job.blocked if self.run.settings.recipe.training.async_save else seconds
            figures = {"seconds": round(seconds, 3), "blocked": round(blocked, 3), "bytes": size}
            events.add(directory, "checkpoint", step=job.step, **figures, through="memory" if job.in_memory else "disk")
        return {}

    def _unseen(self, job: _Job, files: Mapping[str, Document], writers: Mapping[str, int]) -> Fields | None:
        """Wait until every file of a checkpoint is there with its size. Returns what failed if one does not appear: its host has
        written it to another directory with the same path."""
        target, deadline = self._unnamed(job.step), time.monotonic() + SEEN
        size = {name: entry["bytes"] for name, entry in files.items()}
        while absent := manifest.missing(target, size):
            if time.monotonic() > deadline:
                name, problem = absent
                rank = writers[name]
                wrote = f"{name}, which rank {rank} on {self.hosts[rank]} wrote, {problem} as {self.world.host} sees it"
                what = f"checkpoint-{job.step} is not whole and got no name: {wrote}"
                fault = [str(self.run.directory), what, mark.cure(self.hosts[rank]), "host", [self.hosts[rank]]]
                return {"rank": rank, "error": fault}
            time.sleep(0.1)
            for folder in {(target / name).parent for name in files}:
                list(folder.iterdir())  # asks an NFS server again; looking up a name may not
        return None

    def _rotate(self, newest: Path, best: Path | None) -> None:
        """Remove the checkpoints beyond save_total_limit: never the newest or the best, and others only while as many as the
        limit are whole. One that is being uploaded stays until the next time. A checkpoint that is removed loses its name first.

        newest: known to be whole
        """
        limit = self.run.settings.recipe.training.save_total_limit
        if limit is None:
            return
        paths = on_disk.checkpoints(self.run.directory)
        whole = {path: path == newest or manifest.flaw(path) is None for path in paths}
        found = [on_disk.Found(path.name, on_disk.step_of(path), whole[path]) for path in paths]
        for name in on_disk.beyond(limit, found, newest.name, best.name if best else None):
            path = self.run.directory / name
            if not (self.run.uploads and self.run.uploads.holds(path)):
                gone = self.run.directory / SAVING / f"{name}.removed"
                path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _failed(self, error: BaseException, job: _Job) -> Fields:
        """An error on this rank, as _Job.failure has it."""
        known = error if isinstance(error, UserError) else of_disk(error, self.run.directory)
        if known is None and isinstance(error, FileNotFoundError):
            try:
                self.run.check_directory()
            except UserError as gone:
                known = gone
        problem = known.problem if known else f"{type(error).__name__}: {error}"
        where = f"checkpoint-{job.step} could not be written by rank {self.world.rank} on {self.world.host}"
        cure = (
            known.cure
            if known
            else "look at the file system; the same command continues from the newest whole checkpoint"
        )
        fault = whose.of_error(known or error)[0], (self.world.host,)
        return {"rank": self.world.rank, "error": [str(self.run.directory), f"{where}: {problem}", cure, *fault]}


def _bring(source: BinaryIO | Path, target: Path) -> Fields:
    """Copy an open file, or move one within its file system; sync it. Returns its size and checksum."""
    digest, size = xxhash.xxh3_128(), 0
    if isinstance(source, Path):
        files.by_umask(source)
        source.replace(target)
        source, copy = target.open("rb", buffering=0), None
    else:
        copy = target.open("wb", buffering=0)
    with source, copy or source as written:
        while block := source.read(_BLOCK):
            digest.update(block)
            size += len(block)
            rest = memoryview(block)
            while copy and rest:
                rest = rest[copy.write(rest) :]
        os.fsync(written.fileno())
    return {"bytes": size, "checksum": digest.hexdigest()}


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(number)
