"""A run's directory: who it belongs to, what was resolved (run.yaml), where it stands, and whether it succeeded."""

import json
import os
import secrets
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ...errors import UserError
from ...errors.console import counted
from ...errors.tables import Document, Fields
from ..distributed import consistency, heartbeat, ranks, shared_directory, stop
from ..distributed.process import this_process
from ..host import files
from ..host.cluster import World
from ..recipe.batch import Batch, length
from ..recipe.files import another_output, find, read_yaml
from ..recipe.hostfile import read_hostfile
from ..recipe.program import own_code, started_as
from ..recipe.schema import BY_PROOF, identity
from ..recipe.settings import Settings
from ..strategy import Strategy
from . import best_checkpoint, mark, on_disk, owner, page, same_run, starts, versions
from .offers import Offers
from .success import SUCCESS, unfinished

RECORD = "run.yaml"
REHEARSAL = "rehearsal.yaml"  # the recipe of a rehearsal, whose model nobody wants
STOPPED = "stopped.json"  # it was asked to stop, and the same command goes on from the checkpoint that this names
# In C, where libyaml is there: a run.yaml is read and written within a step.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
ANSWERS = "answers.jsonl"  # what the model answered at each evaluation (step/sample_answers.py)
TASK_RESULTS = "task_results.jsonl"  # figures of benchmark tasks
JOB = "BRIGADE_JOB"  # in the environment, set by files of `launch --write`: the same at each start of one job, and no other's
_FOLDERS = ("tensorboard", heartbeat.FOLDER)  # in the run's directory
_NO_RUN = "the output directory holds files, but no run.yaml: it is not a run's"


@dataclass(frozen=True)
class Kernels:
    """What a run computes with, the same on all its ranks (engines/kernels.py).

    attention: the implementation's name, and why it is that one in a few words; no_liger: why Liger's kernels are asked for and
    not used; no_compile: why `auto` compiles nothing; no_sharing: why this attention is not trusted with prompts that two answers
    share on these GPUs; the others: values of the recipe's keys
    """

    attention: str = ""
    why: str = ""
    torch_compile: bool = False
    use_liger_kernel: bool = False
    optim: str = ""
    no_liger: str = ""
    no_compile: str = ""
    no_sharing: str = ""

    def record(self) -> Fields:
        """Return what run.yaml says of them."""
        return {"attention": self.attention} | {key: getattr(self, key) for key in BY_PROOF}


@dataclass(frozen=True)
class Opened:
    """An output directory as a run finds it.

    identity: the short name of the run that is there, a hash of what it computes; "" where none is
    made_for: the recipe's own cluster in words; began: values that it began with, of keys that these settings leave to memory
    resized: whether the directory's run is the same but for its length (max_steps, num_train_epochs)
    finished: whether train.py has reached its end there; no launcher's exit code says that as surely
    """

    directory: Path
    identity: str = ""
    made_for: str = ""
    resized: bool = False
    finished: bool = False
    began: Fields = field(default_factory=dict)

    def run(
        self, settings: Settings, strategy: Strategy, world: World, batch: Batch, kernels: Kernels, offers: Offers
    ) -> "Run":
        """The run that goes on, or begins, in this directory."""
        name = self.identity or identity(settings.before_proofs, strategy.identity())
        about = settings, strategy, world, batch, name, self.directory, kernels, offers
        return Run(*about, made_for=self.made_for, resized=self.resized)


@dataclass(frozen=True)
class Run:
    """One run and its directory: what its steps have decided. claim() and replicas.divide() return it with what they add.

    replica: the ranks that work together: all of the world, or this rank's replica
    offers: what the rooms around the hall do for it
    pages: of its progress, on the rank that writes them
    skipped: which checkpoints it does not continue from, and why; lengthened: how its last checkpoint goes on under a larger
        length, in words

    From claim() on:
    shared: whether all hosts see one directory; else each has its own, and keeps whole checkpoints in it
    same: what all hosts have alike (consistency.check); base: digests of the weights that it begins with, by file
    mark: the token in the directory by which it is known again
    aside: where --fresh moved the directory's earlier run, on the rank that did
    owned: the open file whose lock says that this process has the directory
    uploads: what brings it to object storage, on the rank that does (checkpoint/remote.py: Uploads)

    From divide() on, where it has several replicas, world is this rank's replica, and
    directory: where that keeps its checkpoints; home: the directory of the whole run
    peers: the ranks with this one's place in the other replicas (local.peers.Peers)
    """

    settings: Settings
    strategy: Strategy
    world: World
    batch: Batch
    identity: str
    directory: Path
    kernels: Kernels = field(default_factory=Kernels)
    offers: Offers = field(default_factory=Offers)
    pages: page.Pages = field(default_factory=page.Pages)
    made_for: str = ""
    resized: bool = False
    replica: World = None  # type: ignore[assignment]  # until __post_init__
    skipped: tuple[str, ...] = ()
    lengthened: str = ""
    shared: bool = True
    same: Document = field(default_factory=dict)
    base: Mapping[str, str] = field(default_factory=dict)
    mark: str = ""
    aside: Path | None = None
    owned: owner.Owned | None = None
    uploads: Any = None
    home: Path = None  # type: ignore[assignment]  # until __post_init__
    peers: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "replica", self.replica or self.world.part(self.strategy.replicas))
        object.__setattr__(self, "home", self.home or self.directory)

    @property
    def own_directory(self) -> Path:
        """Where this rank's replica keeps its checkpoints: the first one in the run's directory, as it has the model too."""
        return self.directory / f"replica-{self.replica.replica}" if self.replica.replica else self.directory

    def check_directory(self) -> None:
        """Raise UserError where the directory is no longer the one in which this run began, as this host sees it."""
        mark.check(self.directory, self.mark, self.world.host)

    def note_failure(self, reason: str) -> None:
        """Note why it failed, and write its page; not under `launch`, which has the verdict and does so."""
        if self.settings.recipe.training.report_page and not this_process.agent.watches:
            self.pages.end()
            page.of_failure(self.home, reason)


def open_directory(settings: Settings, strategy: Strategy, world: World) -> Opened:
    """The output directory of the run that these settings ask for. Look only, and change nothing but the count of a job's starts.

    Raise UserError when it holds another run, or what is not a run, when its job gets no further, and for a file `stop`.
    One that comes later, or under `launch`, which has looked before, stops the run at its first step.
    """
    opened = _open(settings, strategy, world)
    asked = world.is_main_rank and not opened.finished and (opened.directory / stop.FILE).exists()
    if asked and not this_process.agent.watches:
        raise stop.refusal(opened.directory / stop.FILE)
    job = os.environ.get(JOB)
    if world.is_main_rank and not opened.finished and job:
        with suppress(OSError):  # whoever trains here says that it cannot be written
            starts.count(
                opened.directory / starts.FILE, job, max(on_disk.whole_checkpoints(opened.directory), default=0)
            )
    return opened


def _open(settings: Settings, strategy: Strategy, world: World) -> Opened:
    best_checkpoint.check(settings)
    directory, made_for = settings.directory(strategy.name), _made_for(settings)
    if directory.exists() and not directory.is_dir():
        cure = f"name a directory: {another_output(directory)}"
        raise UserError(str(directory), "the output directory is a file", cure)
    empty, record = Opened(directory, made_for=made_for), directory / RECORD
    if not directory.exists() or (settings.fresh and record.exists()):
        return empty
    taken = next((directory / name for name in _FOLDERS if (directory / name).is_file()), None)
    if taken:
        problem = "it is a file, and a run writes into a directory of that name"
        raise UserError(str(taken), problem, f"move it away, or {another_output(directory)}")
    if not _occupied(directory):
        return empty
    if not record.exists():
        if world.is_main_rank:  # where hosts do not share the directory, claim() says so
            cure = f"name a directory of its own: {another_output(directory)}; --fresh moves aside only a run's"
            raise UserError(str(directory), _NO_RUN, cure)
        return empty
    old = read_yaml(record)
    began = {key: same_run.began_with(key, old) for key in settings.by_memory}
    settings = settings.deciding(began, "")
    same_run.check(old, settings, strategy, record, next(iter(on_disk.whole_checkpoints(directory).values()), None))
    resized = length(old["training"]) != length(settings.recipe.training.model_dump())
    name = (old.get("run") or {}).get("identity", "")  # it keeps it, whatever hash a later version makes
    return Opened(directory, name, made_for, resized, _is_finished(settings, directory, resized), began)


def _is_finished(settings: Settings, directory: Path, resized: bool) -> bool:
    if settings.fresh or resized or not (directory / SUCCESS).exists():
        return False
    problem = unfinished(directory)
    if not problem or (settings.remote and SUCCESS not in problem):  # the storage has the model, and this host need not
        return True
    if SUCCESS not in problem and not on_disk.whole_checkpoints(directory):
        cure = f"bring it back from a copy; to train the run again from its beginning, remove {directory / SUCCESS}"
        raise UserError(
            str(directory), f"the run ended here, and {problem}; there is no checkpoint to make it anew of", cure
        )
    return False


def _made_for(settings: Settings) -> str:
    cluster, machines = settings.recipe.cluster, ""
    if cluster.hostfile:
        hosts = read_hostfile(find(cluster.hostfile, settings.place("hostfile"), "hostfile"))
        machines = f"{counted(sum(hosts.values()), 'rank')} on {counted(len(hosts), 'host')} ({cluster.hostfile})"
    return ", ".join(filter(None, (machines, cluster.gpu)))


def claim(run: Run, fingerprint: str, checkpoint: Path | None, model: Document) -> Run:
    """Claim the run's directory: move an old run aside if --fresh, and write run.yaml. Return the run with its directory. A
    collective, after each rank has agreed with itself.

    fingerprint: of the data; checkpoint: that it continues from; model: consistency.of_model
    End all ranks with one message when hosts differ in anything that the run goes by, when they do not share a directory
    that they must share, and when it cannot be written.
    """
    same = {
        "recipe": run.settings.recipe.model_dump(mode="json", exclude={"cluster"}),
        "strategy": {"kind": run.strategy.kind} | run.strategy.as_cluster(),
        "batch": {"": str(run.batch)},
        "replicas": {"": run.strategy.replicas},
        **model,
        "data": {"fingerprint": fingerprint},
        "code of your own": own_code(run.settings),
    }
    consistency.check(same, run.world)
    shared = True
    if run.world.size > 1:
        alone = run.strategy.replicas > 1 and all(ranks.gather(run.replica.hosts == 1))  # each replica on its host
        in_parts = "" if alone else run.strategy.writes_in_parts
        shared = shared_directory.is_shared(run.directory, checkpoint, run.world, in_parts)
    hosts = list(dict.fromkeys(ranks.gather(run.world.host)))
    token = ranks.gather(secrets.token_hex(8))[0]
    run = replace(run, same=same, base=model.get("weights", {}), shared=shared, mark=token)
    with ranks.agreed(run.world):
        if run.world.is_main_rank or (run.world.local_rank == 0 and not shared):
            run = _claim(run, fingerprint, hosts)
    return run


def _claim(run: Run, fingerprint: str, hosts: list[str]) -> Run:
    directory, aside = run.directory, None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        occupied = _occupied(directory)
        if occupied and not (directory / RECORD).exists():
            cure = "copy the first host's directory here, or give another --output_dir"
            raise UserError(str(directory), _NO_RUN, cure)
        owned = owner.take(directory)
        if _is_finished(run.settings, directory, run.resized):  # since open_directory() looked
            problem = "another process finished this run just now"
            raise UserError(str(directory), problem, "start the command again: it then has nothing to do")
        kept: Fields = {}
        if occupied or run.lengthened:
            if occupied and run.settings.fresh:
                owned, aside = same_run.move_aside(directory, owned)
            kept = same_run.kept(run.lengthened, run.resized, directory / RECORD, directory / SUCCESS)
        on_disk.remove_leftovers(directory)
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
        "overridden": [*run.settings.overridden, *run.strategy.overridden],
        "kernels": run.kernels.record(),
        **({"decided": run.settings.decided} if run.settings.decided else {}),
        "command": shlex.join(started_as(run.settings.argv)),
        "started": versions.now(),
        "versions": versions.of_packages(),
        "commit": versions.git_commit(),
    }
    _write_record(directory, {**recipe, "run": record | kept})
    files.write(directory / mark.FILE, run.mark)
    return replace(run, owned=owned, aside=aside)


def check_exists(directory: Path, cure: str = "name the output directory of a run") -> None:
    """Raise UserError for what is not a directory."""
    if not directory.is_dir():
        problem = "it is a file, not a directory" if directory.exists() else "there is no such directory"
        raise UserError(str(directory), problem, cure)


def _occupied(directory: Path) -> bool:  # by a run of this replica: what others leave here before it begins is none
    none = owner.FILE, starts.FILE, heartbeat.FOLDER, stop.FILE
    return any(path.name not in none and not path.name.startswith("replica-") for path in directory.iterdir())


def written(directory: Path) -> Fields:  # run.yaml, as this process wrote it
    """The run.yaml that this process has written."""
    return yaml.load(files.read(directory / RECORD), Loader=_LOADER)  # type: ignore[no-any-return]


def add_to_record(run: Run, key: str, value: object) -> None:
    """Add to run.yaml's record what is known only while the run goes on: `ds_config` with every "auto" filled; `prediction`."""
    if run.world.is_main_rank:
        document = written(run.directory)
        document["run"][key] = json.loads(json.dumps(value, default=str))
        _write_record(run.directory, document)


def _write_record(directory: Path, document: Document) -> None:
    text = "# This run, with every value filled in. `train.py --recipe THIS_FILE --output_dir OTHER` repeats it.\n"
    files.write(directory / RECORD, text + yaml.dump(document, Dumper=_DUMPER, sort_keys=False, width=120))


def check_data(run: Run, fingerprint: str) -> None:
    """Raise UserError when the directory's run was trained on other data than there is now."""
    if not run.settings.fresh and (run.directory / RECORD).exists():
        same_run.check_data(run.directory / RECORD, fingerprint, versions.git_commit())


def release(run: Run) -> None:
    """Let another process have the directory."""
    if run.owned:  # a replica's directory is another than the one that was taken
        run.owned.release(run.owned.path.parent)
