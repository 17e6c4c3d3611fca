"""A run whose output is in object storage: written locally first, uploaded during training, brought back to an empty host.

    URL/checkpoint-N/...  then URL/checkpoint-N/brigade.json     a checkpoint is whole there once its manifest is
    URL/run.yaml, events.jsonl, report.html, ...                 after each checkpoint and at the end
    URL/model.safetensors, ...  then URL/success.json            at the end

One rank uploads, in a thread: it has the directory in which checkpoints are whole. A newer checkpoint takes the place of one that
waits, so training never waits for the network.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from ...errors import UserError
from ...errors.console import counted
from ..distributed import ranks
from ..host import storage
from ..host.cluster import World
from ..host.storage import in_words
from ..recipe.files import parse_yaml, read_yaml
from ..recipe.settings import Settings
from ..run import directory as runs
from ..run import on_disk
from ..run.on_disk import SAVING
from ..run.success import SUCCESS, unfinished
from . import manifest
from .uploads import MARKERS, There, Uploads, best_of, checkpoints_there, is_record

PLACE = "flag --output_dir"


# ---- bringing a run to a host ----------------------------------------------------------------------------------------
def bring_records(settings: Settings, world: World) -> None:
    """Bring what the storage has of this run besides weights, where it knows more than this host's directory. A collective.

    Ends all ranks with one message where the storage cannot be written, holds another run or something else, or is
    occupied and --fresh is given.
    """
    if not settings.remote:
        return

    def bring() -> None:
        directory, remote = settings.directory(""), storage.open_storage(settings.remote, PLACE)
        with in_words(settings.remote, PLACE):
            if world.is_main_rank:
                remote.probe()
            there = remote.sizes()
        _check_free(settings, there)
        if runs.RECORD not in there:
            return
        if (directory / runs.RECORD).is_file():
            with in_words(settings.remote, PLACE):
                _check_same(settings, directory, remote.read(runs.RECORD))
        newest = max((found.step for found in _whole(remote, there)), default=0)
        newest = sys.maxsize if SUCCESS in there else newest
        if (directory / runs.RECORD).is_file() and newest <= max(on_disk.whole_checkpoints(directory), default=0):
            return  # this host was there when it was written
        if SUCCESS not in unfinished(directory):
            return
        records = [name for name in there if is_record(name)]
        with in_words(settings.remote, PLACE):
            for name in sorted(records, key=lambda name: (name in MARKERS, name)):
                remote.get(name, directory / name)

    _on_each_host(world, bring)


def bring_checkpoint(run: runs.Run) -> None:
    """Download the newest whole checkpoint of the storage where this host has only older ones, and the best one with it. A
    collective. One whose bytes do not match its manifest is left out, and the one before it is taken."""
    settings = run.settings
    if not settings.remote or settings.fresh or settings.resume_from_checkpoint:
        return

    def bring() -> None:
        remote = storage.open_storage(settings.remote, PLACE)
        with in_words(settings.remote, PLACE):
            whole = _whole(remote, remote.sizes())
        here = [path for path in on_disk.checkpoints(run.directory) if manifest.flaw(path) is None]
        newest = on_disk.step_of(here[0]) if here else -1
        for found in whole:
            if found.step <= newest:
                return
            with in_words(settings.remote, PLACE):
                folder = _download(remote, found, run.directory)
            if folder is None:
                continue
            step = best_of(folder)
            best = next((each for each in whole if each.step == step), None)
            if best and step not in on_disk.whole_checkpoints(run.directory):
                with in_words(settings.remote, PLACE):
                    _download(remote, best, run.directory)
            return

    _on_each_host(run.world, bring)


def _on_each_host(world: World, work: Callable[[], None]) -> None:
    """Call `work` on rank 0, then on the first rank of every other host, which may see the same directory."""
    with ranks.agreed(world):
        if world.is_main_rank:
            work()
    with ranks.agreed(world):
        if world.local_rank == 0 and not world.is_main_rank:
            work()


def _check_free(settings: Settings, there: Mapping[str, int]) -> None:
    """Raise UserError where what lies at the URL does not belong to a run, or where --fresh would have to move it aside."""
    objects = [name for name in there if not name.startswith(".probe-")]
    if not objects:
        return
    other = f"--output_dir {settings.remote}-2"
    if settings.fresh:
        problem = f"it holds {counted(len(objects), 'object')}, and objects cannot be moved aside as a directory is"
        raise UserError(settings.remote, problem, f"leave --fresh out to continue that run, remove it, or give {other}")
    if runs.RECORD not in there:
        problem = f"it holds objects ({objects[0]}), but no {runs.RECORD}: it is not a run's"
        raise UserError(settings.remote, problem, f"name a folder of its own: {other}")


def _check_same(settings: Settings, directory: Path, text: bytes) -> None:
    """Raise UserError where the run in the storage is not the run in the local directory."""
    try:
        there = (parse_yaml(text.decode()).get("run") or {}).get("identity")
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError):
        raise UserError(
            settings.remote, f"its {runs.RECORD} is not what a run has written", "name another folder"
        ) from None
    here = (read_yaml(directory / runs.RECORD).get("run") or {}).get("identity")
    if there != here:
        problem = f"it holds another run ({there}) than {directory}, where it lies on this host ({here})"
        cure = f"move {directory} away, or name a folder of its own: --output_dir {settings.remote}-2"
        raise UserError(settings.remote, problem, cure)


def _whole(remote: storage.Storage, there: Mapping[str, int]) -> list[There]:
    """Return the whole checkpoints of a storage, newest first."""

    def read(name: str) -> bytes:
        with in_words(remote.url, PLACE):
            return remote.read(name)

    return [found for found in checkpoints_there(there, read) if found.whole]


def _download(remote: storage.Storage, found: There, directory: Path) -> Path | None:
    """Return the checkpoint, downloaded and compared with its manifest; None where its bytes differ."""
    name, record = f"checkpoint-{found.step}", found.record or {}
    aside, final = directory / SAVING / f"{name}.brought", directory / name
    renamed = f", which holds step {found.step}, by its manifest" if found.name != name else ""
    print(f"Downloading {found.name} from {remote.url}{renamed}.", flush=True)
    began, files = time.perf_counter(), manifest.sizes(record)
    for file in (*files, manifest.RECORD):
        remote.get(f"{found.name}/{file}", aside / file)
    for folder in record.get("folders", ()):
        (aside / folder).mkdir(parents=True, exist_ok=True)
    problem = manifest.flaw(aside) or manifest.damage(aside)
    if problem:
        print(f"warning: {remote.url}/{found.name} is left out: {problem}", file=sys.stderr, flush=True)
        return None
    if final.exists():  # it is not whole, or holds another step: else this one would not have been downloaded
        own = directory / f"checkpoint-{on_disk.step_of(final)}"
        final.rename(directory / SAVING / f"{name}.flawed" if own.exists() else own)
    aside.rename(final)
    gib, seconds = sum(files.values()) / 2**30, time.perf_counter() - began
    print(f"Downloaded {gib:.2f} GiB in {seconds:.1f} s.", flush=True)
    return final


# ---- uploading a run -------------------------------------------------------------------------------------------------
def begin(run: runs.Run) -> runs.Run:
    """Return the run with its uploads, on the rank that makes them. It removes markers of an earlier end, and uploads run.yaml
    and a whole checkpoint that the storage lacks. A collective."""
    if not run.settings.remote:
        return run
    with ranks.agreed(run.world):
        if run.world.is_main_rank:
            uploads = _uploads(run.settings, run.directory)
            with in_words(run.settings.remote, PLACE):
                uploads.storage.remove(marker for marker in MARKERS if not (run.directory / marker).exists())
                uploads.put_records()
            uploads.add_newest()
            run = replace(run, uploads=uploads)
    return run


def _uploads(settings: Settings, directory: Path) -> Uploads:
    remote = storage.open_storage(settings.remote, PLACE)
    return Uploads(remote, directory, settings.recipe.training.save_total_limit)


def finish(run: runs.Run) -> None:
    """Upload what a run that has ended leaves. A collective. Ends all ranks with one message where something is not there."""
    if run.settings.remote:
        with ranks.agreed(run.world):
            if run.uploads:
                run.uploads.finish()


def upload_rest(settings: Settings, world: World) -> None:
    """Upload what a finished run has left here, where its storage lacks the marker of its end. A collective."""
    if not settings.remote:
        return
    with ranks.agreed(world):
        directory = settings.directory("")
        if not world.is_main_rank or not (directory / SUCCESS).is_file():
            return
        uploads = _uploads(settings, directory)
        with in_words(settings.remote, PLACE):
            there = SUCCESS in uploads.storage.sizes() and uploads.storage.read(SUCCESS)
        if there != (directory / SUCCESS).read_bytes():
            uploads.add_newest()
            uploads.finish()
