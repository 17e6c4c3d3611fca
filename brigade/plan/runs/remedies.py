"""Name what would make a run fit after an out-of-memory error: the fewest changes of its command by the planner's count."""

import functools
import itertools
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UserError
from ...errors.tables import Document, Fields
from ...train.checkpoint import compatibility
from ...train.host import control_groups
from ...train.host.cluster import World
from ...train.recipe import flags
from ...train.recipe.batch import batch_arithmetic
from ...train.recipe.files import REPOSITORY, another_output, read_yaml
from ...train.run import on_disk, same_run
from ...train.run.directory import RECORD, Run
from ...train.run.offers import Remedies
from ...train.step import preflight
from ...train.strategy import check, choose
from .. import hardware
from ..choice.job_of_run import ATTENTION, NotCovered
from ..choice.search import refusal
from ..choice.workload import Cluster
from ..costs.estimate import Estimate, estimate
from ..costs.memory import GIB
from ..hardware import gpu_here
from .prediction import planned_job

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Next:
    """How the same command goes on with a change. keeps: whether what was trained so far is kept; words: that it needs besides;
    note: what to know of it"""

    keeps: bool
    words: tuple[str, ...] = ()
    note: str = ""


def after(run: Run, changed: Run) -> Next | None:
    """Return how the command of `run` goes on as `changed`; None where train.py would refuse it (run/directory.py: _open,
    checkpoint/resume.py: choose)."""
    settings, strategy = changed.settings, changed.strategy
    record, there = run.home / RECORD, settings.directory(strategy.name)
    newest = next(iter(on_disk.whole_checkpoints(run.home).values()), None)
    anew = Next(newest is None, note="begins anew" if newest else "")
    if settings.fresh or not record.is_file():
        return anew
    old: Fields = read_yaml(record)
    here = there.resolve() == run.home.resolve() and same_run.another_run(old, settings, strategy)[0] is None
    reads = newest is None or compatibility.refusal(newest, changed) is None
    if here and reads:
        return Next(True)
    words = (another_output(there),) if there.exists() else ()
    sharded_otherwise = same_run.another_run(old, settings, strategy, with_strategy=False)[0] is None
    if newest and sharded_otherwise and reads:
        return Next(True, (*words, shlex.join(["--resume_from_checkpoint", str(newest)])))
    if settings.resume_from_checkpoint:  # it belongs to the run as it was
        return None
    return replace(anew, words=words)


MOST = 3  # ways that are named
TOGETHER = 3  # changes at once
STRATEGIES = ("stage", "offload", "axes")  # kinds of changes of which a run takes one: each is another file


@dataclass(frozen=True, eq=False)
class Change:
    """Something that a run may do otherwise.

    kind: of two changes of one kind a run takes one; flag: how train.py is told; values: of the recipe's training section
    strategy: (the key of the recipe's cluster section, a file), where it is another strategy
    """

    kind: str
    flag: str
    values: Document = field(default_factory=dict)
    strategy: tuple[str, str] | None = None


@dataclass(frozen=True)
class Way:
    """Changes that make the run fit, with the run and its estimate."""

    changes: tuple[Change, ...]
    run: Run
    estimate: Estimate


def what_fits(run: Run, config: "PreTrainedConfig", needed: float) -> Remedies:
    """Return what the planner counts for a run, and up to three of the smallest sets of changes that fit by its count.

    config: the model's; needed: bytes that the run's GPU would have had to hold. Where the planner counts less, its other counts
    are raised as much.

    Raises NotCovered where formulas do not cover the run, and without a GPU.
    """
    device = gpu_here()
    if device is None:
        raise NotCovered("there is no GPU")
    own = _estimated(run, config, device)
    raised = max(1.0, needed / GIB / own.device_gib)
    counted = f"the planner counts {own.device_gib:.1f} of {device.memory_gib:.1f} GiB for this run"
    counted += ", which fits" if own.fits else f", up to {own.most_gib:.1f}, which may not fit" if own.may_fit else ""
    # A way that saves less than 1 % is none.
    ways = _smallest(run, config, own, min(0.99 * own.device_gib, device.memory_gib / raised))
    return Remedies(counted, own.may_fit, tuple(_in_words(run, way, raised) for way in ways))


def _in_words(run: Run, way: Way, raised: float) -> str:
    """Return what the same command has to be given for a way, and the memory that the run then takes."""
    following = after(run, way.run)
    assert following is not None
    words = [change.flag for change in way.changes] + [*following.words]
    for named in (change.strategy[0] for change in way.changes if change.strategy):
        (other,) = {*flags.STRATEGIES} - {named}  # of the two, one command takes one
        if run.settings.sources.get(other, "").startswith("flag"):
            words.append(f"instead of --{other}")
    about = [f"{raised * way.estimate.device_gib:.1f} GiB", following.note]
    return f"{' '.join(words)} ({', '.join(filter(None, about))})"


def _estimated(run: Run, config: "PreTrainedConfig", device: hardware.Gpu) -> Estimate:
    job = planned_job(run, config, 0, device.kind)
    return estimate(replace(job, attention=ATTENTION.get(run.kernels.attention, "flash2")), device)


def _smallest(run: Run, config: "PreTrainedConfig", own: Estimate, limit: float) -> list[Way]:
    """Return ways below `limit` GiB of which no part is enough, one of each set of kinds: those first that keep what was trained,
    then those with fewer flags, then the fastest."""
    changes = _changes(run, config, own)
    found: list[Way] = []
    following = functools.cache(lambda change: _following(run, config, own, change))

    def order(way: Way) -> tuple[bool, int, float]:
        after = [following(change) for change in way.changes]
        more = {word for each in after if each for word in each.words}  # a new directory is a flag, too
        keeps = all(each and each.keeps for each in after)
        return not keeps, len(way.changes) + len(more), way.estimate.time.total

    for count in range(1, TOGETHER + 1):
        for kinds in itertools.combinations(changes, count):
            enough = any({change.kind for change in way.changes} <= {*kinds} for way in found)
            if enough or len({*kinds} & {*STRATEGIES}) > 1:
                continue
            tried = (_way(run, config, own, chosen) for chosen in itertools.product(*(changes[kind] for kind in kinds)))
            fitting = [way for way in tried if way and way.estimate.fits and way.estimate.device_gib < limit]
            possible = (way for way in sorted(fitting, key=order) if all(map(following, way.changes)))
            found += itertools.islice((way for way in possible if not _exceeds_the_host(way)), 1)
        if len(found) >= MOST:
            break
    return sorted(found, key=order)[:MOST]


def _changes(run: Run, config: "PreTrainedConfig", own: Estimate) -> dict[str, list[Change]]:
    """Return what a run may do otherwise, by kind."""
    training, axes, job = run.settings.recipe.training, run.strategy.axes, own.job
    changes = [
        Change("micro-batch", f"--per_device_train_batch_size {micro}", {"per_device_train_batch_size": micro})
        for micro in range(run.batch.micro - 1, 0, -1)
        if run.batch.micro * run.batch.accumulation % micro == 0
    ]
    if not training.activation_checkpointing:
        changes.append(Change("checkpointing", "--activation_checkpointing", {"activation_checkpointing": True}))
    if find_spec("liger_kernel") and not (training.torch_compile or run.kernels.use_liger_kernel):
        changes.append(Change("kernels", "--use_liger_kernel", {"use_liger_kernel": True}))
    if job.loss != "tiled" and axes.tensor * axes.stages == 1:
        changes.append(Change("loss", "--tiled_loss", {"tiled_loss": True}))
    if run.strategy.replicas == 1:
        changes += _other_strategies(run, config, own)
    kinds = dict.fromkeys(change.kind for change in changes)
    return {kind: [change for change in changes if change.kind == kind] for kind in kinds}


def _other_strategies(run: Run, config: "PreTrainedConfig", own: Estimate) -> Iterator[Change]:
    """Yield the files of ds_configs/ and accelerate_configs/ by which less lies on a GPU, and that the run can take."""
    seen: list[Any] = []
    for key, path in _files(run.world):
        file = str(path.relative_to(REPOSITORY))
        change = Change("", f"--{key} {file}", strategy=(key, file))
        way = _way(run, config, own, (change,))
        if way is None or way.estimate.device_gib >= own.device_gib:
            continue
        # Of accelerate's files several differ in hosts and ranks alone, which train.py leaves to its launcher.
        described = way.run.strategy.as_cluster()
        if described in seen:
            continue
        seen.append(described)
        job = way.estimate.job
        # Disks that nobody measured, other losses, slow networks, and a host's memory that is the GPU's.
        elsewhere = job.offload == "nvme" or job.quantised or job.hpz or (job.offload and own.gpu.integrated)
        if elsewhere or (job.gpus == 1 and not job.offload):  # and one rank has nobody to shard with
            continue
        kind = "offload" if job.offload else "axes" if job.axes != own.job.axes else "stage"
        yield replace(change, kind=kind)


def _files(world: World) -> Iterator[tuple[str, Path]]:
    """Yield the files that may name another strategy, each behind its key; of accelerate's those first that are for so many ranks
    on so many hosts."""
    here = f"_{world.size // world.local_size}x{world.local_size}"
    for path in sorted((REPOSITORY / "ds_configs").glob("*.json")):
        yield "ds_config", path
    configs = (REPOSITORY / "accelerate_configs").glob("*.yaml")
    for path in sorted(configs, key=lambda path: (not path.stem.endswith(here), path)):
        yield "accelerate_config", path


def _way(run: Run, config: "PreTrainedConfig", own: Estimate, changes: tuple[Change, ...]) -> Way | None:
    """Return the run with these changes; None where train.py refuses it, or no formula covers it."""
    values: Fields = {"per_device_train_batch_size": run.batch.micro}
    for change in changes:
        values |= change.values
    settings, strategy = run.settings.with_training(**values), run.strategy
    left_to_proofs = tuple(key for key in settings.by_proof if key not in values)  # a flag decides the others
    settings = replace(settings, by_proof=left_to_proofs)
    try:
        named = dict(change.strategy for change in changes if change.strategy)
        if named:
            cluster = settings.recipe.cluster.model_copy(update=dict.fromkeys(flags.STRATEGIES) | named)
            settings = replace(settings, recipe=settings.recipe.model_copy(update={"cluster": cluster}))
            strategy = choose(settings, run.world, env={})
        else:
            check(strategy, settings, run.world)
        shares = strategy.axes.data(run.world.size) if named else run.batch.data_parallel_size
        batch = batch_arithmetic(settings.recipe.training, shares, settings.place("global_batch_size"))
        liger = values.get("use_liger_kernel", run.kernels.use_liger_kernel)
        kernels = replace(run.kernels, use_liger_kernel=liger)
        changed = replace(run, settings=settings, strategy=strategy, batch=batch, kernels=kernels)
        return Way(changes, changed, _estimated(changed, config, own.gpu))
    except (UserError, NotCovered):
        return None


def _following(run: Run, config: "PreTrainedConfig", own: Estimate, change: Change) -> Next | None:
    """Return how the command goes on with this change; None where the model, this host or the run's directory do not allow it, as
    train.py would find when it begins (step/preflight.py)."""
    way = _way(run, config, own, (change,))
    if way is None:
        return None
    try:
        preflight.check_host(way.run.settings, way.run.strategy, way.run.world)
        preflight.check_strategy(way.run, config)
    except UserError:
        return None
    return after(run, way.run)


def _exceeds_the_host(way: Way) -> bool:
    """Return whether what is offloaded may need more memory than hosts like this one have."""
    job = way.estimate.job
    cluster = Cluster(job.gpu, job.node_size, job.nodes, host_gib=control_groups.memory() / GIB)
    return bool(job.offload and refusal(job, cluster, way.estimate.gpu))
