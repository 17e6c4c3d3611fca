"""A run's directory: who it belongs to, what was resolved (run.yaml), where it stands, and whether it succeeded."""

import json
import os
import platform
import secrets
import shlex
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from ...errors import UserError
from ...errors.console import counted
from .. import files
from ..cluster import World
from ..distributed import consistency, heartbeat, ranks, shared_directory, stop, supervised
from ..hostfile import read_hostfile
from ..offers import Offers
from ..recipe.batch import Batch, length
from ..recipe.files import REPOSITORY, another_output, find, read_yaml
from ..recipe.flags import Settings
from ..recipe.identity import identity
from ..strategy import Strategy
from . import earlier, leftovers, mark, owner, page, same_run, starts
from .best_checkpoint import check

RECORD = "run.yaml"
SUCCESS = "success.json"
STOPPED = "stopped.json"  # it was asked to stop, and the same command goes on from the checkpoint that this names
_LOADER, _DUMPER = (getattr(yaml, f"C{kind}", getattr(yaml, kind)) for kind in ("SafeLoader", "SafeDumper"))
STATE = "trainer_state.json"  # Trainer writes it last into a checkpoint, and at a run's end beside the model
ANSWERS = "answers.jsonl"  # what the model answered at each evaluation (training/sample_answers.py)
JOB = "BRIGADE_JOB"  # in the environment, set by files of `launch --write`: the same at each start of one job, and no other's
_NO_RUN = "the output directory holds files, but no run.yaml: it is not a run's"
_PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "peft", "datasets")


@dataclass
class Run:
    """One run and its directory."""

    settings: Settings
    strategy: Strategy
    world: World
    batch: Batch
    identity: str  # its short name, a hash of what it computes
    directory: Path
    made_for: str = ""  # the recipe's own cluster in words
    shared: bool = True  # whether all hosts see one directory; else each has its own, and keeps whole checkpoints in it
    same: dict[str, Any] = field(default_factory=dict)  # what all hosts have alike: consistency.check
    base: dict[str, str] = field(default_factory=dict)  # digests of the weights that it begins with, by file
    kernels: dict[str, Any] = field(default_factory=dict)  # what it computes with: attention, and each key of BY_PROOF
    skipped: list[str] = field(default_factory=list)  # which checkpoints it does not continue from, and why
    # checkpoint-N -> what is wrong with it, where sizes do not tell
    damaged: dict[str, str] = field(default_factory=dict)
    resized: bool = False  # whether the directory's run is the same but for its length (max_steps, num_train_epochs)
    lengthened: str = ""  # how its last checkpoint goes on under a larger length, in words
    aside: Path | None = None  # where --fresh moved the directory's earlier run, on the rank that did
    replica: World = None  # type: ignore[assignment]  # the ranks that work together: all, or this rank's replica
    owned: Any = None  # the open file whose lock says that this process has the directory
    offers: Offers = field(default_factory=Offers)  # what the rooms around the hall do for it
    mark: str = ""  # the token in the directory by which it is known again, from claim() on

    def __post_init__(self) -> None:
        self.replica = self.replica or self.world.part(self.strategy.replicas)

    @property
    def own_directory(self) -> Path:
        """Where this rank's replica keeps its checkpoints: the first one in the run's directory, as it has the model too."""
        return self.directory / f"replica-{self.replica.replica}" if self.replica.replica else self.directory

    def check_directory(self) -> None:
        """Raise UserError where the directory is no longer the one in which this run began, as this host sees it."""
        mark.check(self.directory, self.mark, self.world.host)

    @property
    def finished(self) -> bool:
        """True when train.py reached its end here; no launcher's exit code says that as surely."""
        return not self.settings.fresh and not self.resized and (self.directory / SUCCESS).exists()


def open_run(settings: Settings, strategy: Strategy, world: World, batch: Batch, offers: Offers | None = None) -> Run:
    """The run that these settings ask for. Looks only, and changes nothing but the count of a job's starts.

    Raises UserError when its directory holds another run, or something that is no run, and when its job gets no further.
    """
    run = _open(settings, strategy, world, batch)
    run.offers = offers or Offers()
    if world.is_main_rank and not run.finished and (job := os.environ.get(JOB)):
        with suppress(OSError):  # whoever trains here says that it cannot be written
            starts.count(run.directory / starts.FILE, job, max(whole_checkpoints(run.directory), default=0))
    return run


def _open(settings: Settings, strategy: Strategy, world: World, batch: Batch) -> Run:
    training = settings.recipe.training
    if training.load_best_model_at_end or training.early_stopping_patience:
        check(settings)
    directory = settings.directory(strategy.name)
    name = identity(settings.before_proofs, strategy.identity())
    run = Run(settings, strategy, world, batch, name, directory, _made_for(settings))
    if directory.exists() and not directory.is_dir():
        cure = f"name a directory: {another_output(directory)}"
        raise UserError(str(directory), "the output directory is a file", cure)
    if settings.fresh or not directory.exists() or not _occupied(directory):
        return run
    record = directory / RECORD
    if not record.exists():
        if world.is_main_rank:  # where hosts do not share the directory, claim() says so
            cure = f"name a directory of its own: {another_output(directory)}; --fresh moves these files aside"
            raise UserError(str(directory), _NO_RUN, cure)
        return run
    old = read_yaml(record)
    same_run.check(old, run, record, next(iter(whole_checkpoints(directory).values()), None))
    run.resized = length(old["training"]) != length(run.settings.recipe.training.model_dump())
    run.identity = (old.get("run") or {}).get("identity", name)  # it keeps it, whatever hash a later version makes
    return run


def _made_for(settings: Settings) -> str:
    cluster, machines = settings.recipe.cluster, ""
    if cluster.hostfile:
        hosts = read_hostfile(find(cluster.hostfile, settings.place("hostfile"), "hostfile"))
        machines = f"{counted(sum(hosts.values()), 'rank')} on {counted(len(hosts), 'host')} ({cluster.hostfile})"
    return ", ".join(filter(None, (machines, cluster.gpu)))


def claim(run: Run, fingerprint: str, checkpoint: Path | None, model: dict[str, Any]) -> None:
    """After each rank agreed with itself: move an old run aside if --fresh, and write run.yaml. A collective.

    model: consistency.of_model
    Ends all ranks with one message when hosts differ in anything that the run goes by, when they do not share a directory
    that they must share, and when it cannot be written.
    """
    same = {
        "recipe": run.settings.recipe.model_dump(mode="json", exclude={"cluster"}),
        "strategy": {"kind": run.strategy.kind} | run.strategy.as_cluster(),
        "batch": {"": str(run.batch)},
        "replicas": {"": run.strategy.replicas},
        **model,
        "data": {"fingerprint": fingerprint},
    }
    consistency.check(same, run.world)
    run.same = same
    run.base = model.get("weights", {})
    if run.world.size > 1:
        on_one_host = run.strategy.replicas > 1 and run.replica.size <= run.world.local_size
        in_parts = "" if on_one_host else run.strategy.writes_in_parts
        run.shared = shared_directory.is_shared(run.directory, checkpoint, run.world, in_parts)
    ours = run.settings.recipe.training.report_page and not supervised.is_watched()  # else launch has the verdict
    ranks.on_failure = lambda reason: _note_failure(run.directory, reason) if ours else None
    hosts = list(dict.fromkeys(ranks.gather(run.world.host)))
    run.mark = ranks.gather(secrets.token_hex(8))[0]
    with ranks.agreed(run.world):
        if run.world.is_main_rank or (run.world.local_rank == 0 and not run.shared):
            _claim(run, fingerprint, hosts)


def _note_failure(directory: Path, reason: str) -> None:
    page.of_failure(directory, reason)


def checkpoints(directory: Path) -> list[Path]:
    """Every checkpoint-N in it, newest first, whole or not."""
    found = (path for path in directory.glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal())
    return sorted(found, key=step_of, reverse=True)


def whole_checkpoints(directory: Path) -> dict[int, Path]:
    """step -> checkpoint-N, of those that were written to their end."""
    return {step_of(path): path for path in checkpoints(directory) if (path / STATE).is_file()}


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _claim(run: Run, fingerprint: str, hosts: list[str]) -> None:
    directory = run.directory
    if (directory / stop.FILE).exists():  # left from before, or somebody wants no further attempt
        problem = "this file stops the run as soon as it trains"
        raise UserError(str(directory / stop.FILE), problem, "remove it, and start again")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        occupied = _occupied(directory)
        if not run.settings.fresh and occupied and not (directory / RECORD).exists():
            cure = "copy the first host's directory here, or give another --output_dir"
            raise UserError(str(directory), _NO_RUN, cure)
        run.owned = owner.take(directory)
        if run.finished:  # since open_run() looked
            problem = "another process finished this run just now"
            raise UserError(str(directory), problem, "start the command again: it then has nothing to do")
        kept: dict[str, Any] = {}
        if occupied or run.lengthened:
            if occupied and run.settings.fresh:
                earlier.move_aside(run)
            kept = earlier.kept(run, directory / RECORD, directory / SUCCESS)
        leftovers.remove(directory)
        (directory / SUCCESS).unlink(missing_ok=True)  # of the run that is lengthened now
        (directory / STOPPED).unlink(missing_ok=True)
    except OSError as error:
        problem = f"the output directory cannot be written: {error.strerror}"
        raise UserError(str(directory), problem, "give another --output_dir") from None
    recipe = run.settings.document()
    recipe["cluster"] |= run.strategy.as_cluster()  # not a path: run.yaml repeats the run when the file has changed
    record = {
        "identity": run.identity,
        "data": fingerprint,
        "strategy": {"kind": run.strategy.kind, "name": run.strategy.name, "from": run.strategy.source},
        "batch": str(run.batch),
        "learning_rate": run.batch.learning_rate,
        "ranks": run.replica.size,
        "replicas": run.strategy.replicas,
        "hosts": hosts,
        "launcher": run.world.launcher,
        "overridden": run.settings.overridden,
        "kernels": run.kernels,
        "command": shlex.join(["train.py", *run.settings.argv]),
        "started": now(),
        "versions": versions(),
        "commit": git_commit(),
    }
    _write_record(directory, {**recipe, "run": record | kept})
    files.write(directory / mark.FILE, run.mark)


def check_exists(directory: Path, cure: str = "name the output directory of a run") -> None:
    """Raises UserError for what is no directory."""
    if not directory.is_dir():
        problem = "it is a file, not a directory" if directory.exists() else "there is no such directory"
        raise UserError(str(directory), problem, cure)


def _occupied(directory: Path) -> bool:  # by a run of this replica: what others leave here before it begins is none
    none = owner.FILE, starts.FILE, heartbeat.FOLDER
    return any(path.name not in none and not path.name.startswith("replica-") for path in directory.iterdir())


def written(directory: Path) -> dict[str, Any]:  # run.yaml, as this process wrote it
    return yaml.load(files.read(directory / RECORD), Loader=_LOADER)  # type: ignore[no-any-return]


def add_to_record(run: Run, key: str, value: Any) -> None:
    """Add to run.yaml's record what is known only while the run goes on: `ds_config` with every "auto" filled; `promise`."""
    if run.world.is_main_rank:
        (document := written(run.directory))["run"][key] = json.loads(json.dumps(value, default=str))
        _write_record(run.directory, document)


def _write_record(directory: Path, document: dict[str, Any]) -> None:
    text = "# This run, with every value filled in. `train.py --recipe THIS_FILE --output_dir OTHER` repeats it.\n"
    files.write(directory / RECORD, text + yaml.dump(document, Dumper=_DUMPER, sort_keys=False, width=120))


def check_data(run: Run, fingerprint: str) -> None:
    """Raises UserError when the directory's run was trained on other data than there is now."""
    if not run.settings.fresh and (run.directory / RECORD).exists():
        earlier.check_data(run.directory / RECORD, fingerprint, git_commit())


def release(run: Run) -> None:
    """Let another process have the directory."""
    if run.owned:  # a replica's directory is another than the one that was taken
        owner.release(run.owned, run.owned.path.parent)
    run.owned = None


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def git_commit() -> str | None:
    """The repository's commit, with a + when files differ from it; None outside of git."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
