"""Estimate a recipe with the micro-batch and keys that a GPU has the memory for, and say where its model comes from. No torch."""

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from ...errors import UserError
from ...errors.tables import Document, Fields, table
from ...train.host.cluster import World
from ...train.model.config_json import grown_vocabulary, with_vocabulary
from ...train.recipe import flags
from ...train.recipe.batch import Batch, batch_arithmetic
from ...train.recipe.files import REPOSITORY, find
from ...train.recipe.hostfile import read_hostfile
from ...train.recipe.schema import BY_MEMORY, Recipe
from ...train.recipe.settings import Settings
from ...train.recipe.training_section import TrainingSection
from ...train.strategy import Strategy, choose
from ..costs.estimate import Estimate, estimate
from ..costs.images import NOT_ASKED, Asked
from ..costs.job import Job
from ..hardware import Gpu, gpu
from ..hardware.network import hold_name
from ..shape.find import RECIPES, described, known_config, named_config
from ..shape.tower import described_with_tower
from .job_of_run import NotCovered, job_of_run
from .workload import CHOICES, Cluster, Workload, with_sizes

Count = Callable[[Recipe, Batch], Estimate]
FILLED = 4  # micro-batches for each stage of a pipeline, which then idles for a fifth of a step at most
NEAR = 1.02  # times the fastest step, within which what takes the least memory is taken: formulas tell no less apart


def automatic(batch: Batch, strategy: Strategy) -> Iterator[Batch]:
    """Yield the batch with each micro-batch that `auto` may take, the largest first."""
    share, stages = batch.micro * batch.accumulation, strategy.axes.stages
    least = FILLED * stages if stages > 1 else 1
    for micro in range(8, 0, -1):
        if share % micro == 0 and (micro == 1 or share // micro >= least):
            yield replace(batch, micro=micro, accumulation=share // micro)


def counting(
    strategy: Strategy, ranks: int, node_size: int, config: Document, device: Gpu, place: str, asked: Asked = NOT_ASKED
) -> Count:
    """Return what estimates a recipe with a batch on `device`. The arguments and errors are those of job_of_run."""

    def count(recipe: Recipe, batch: Batch) -> Estimate:
        job = job_of_run(recipe, strategy, batch, ranks, node_size, config, device.kind, place=place, asked=asked)
        return estimate(job, device)

    return count


def largest_fit(recipe: Recipe, strategy: Strategy, batch: Batch, count: Count) -> tuple[int, str]:
    """Return (the largest micro-batch that fits the GPU, in words how far it fills it).

    It is at most 8, divides a rank's share, leaves a pipeline micro-batches to fill it, and fits at the upper end of its
    interval; else 1. count: of counting()
    """
    anywhere = recipe.cluster.model_copy(update={"network": None})  # memory is the same whatever it is
    recipe = recipe.model_copy(update={"cluster": anywhere})
    for tried in automatic(batch, strategy):
        result = count(recipe, tried)
        filled = f"{result.device_gib:.0f} of {result.gpu.memory_gib:.0f} GiB"
        if result.fits:
            return tried.micro, f"the planner's: {filled}"
    return 1, f"the least; the planner counts {filled}, which may not fit"


def fastest_fit(
    recipe: Recipe, keys: Collection[str], strategy: Strategy, batch: Batch, count: Count
) -> tuple[Fields, str]:
    """Return (the values of `keys`, of schema.BY_MEMORY, with which the GPU trains fastest among those that fit at the upper end
    of their interval and keep the margin of `plan`, in words how far they fill it); those that take the least where none does.

    An automatic micro-batch is then the one with which that is so. count: of counting()
    """
    batches = [batch]
    if recipe.training.per_device_train_batch_size == "auto":
        batches = list(automatic(batch, strategy))
    careful = {key: BY_MEMORY[key] for key in keys}
    # What `auto` may become: the key's default, and what takes the least memory.
    values_of = [(TrainingSection.model_fields[key].default, BY_MEMORY[key]) for key in keys]
    ways = [dict(zip(keys, values, strict=True)) for values in product(*values_of)]

    def counted(way: Fields, tried: Batch) -> Estimate:
        training = recipe.training.model_copy(update=way)
        return count(recipe.model_copy(update={"training": training}), tried)

    least = min((counted(careful, tried) for tried in batches), key=lambda result: result.most_gib)
    fitting = []
    for way, tried in product(ways, batches):
        try:
            result = counted(way, tried)
        except NotCovered:  # of the careful way it has told
            continue
        if result.fits and result.spare_gib >= Workload.margin * result.gpu.memory_gib:
            fitting.append((result, way))
    if not fitting:
        return careful, f"the least; the planner counts {_filled(least)}"
    soonest = NEAR * min(result.time.total for result, _ in fitting)
    near = [(result, way) for result, way in fitting if result.time.total <= soonest]
    result, way = min(near, key=lambda found: found[0].most_gib)
    return way, f"the planner's: {_filled(result)}"


def _filled(result: Estimate) -> str:
    return f"{result.device_gib:.0f} of {result.gpu.memory_gib:.0f} GiB, up to {result.most_gib:.0f}"


BESIDE = "config.json"
STRATEGIES = {choice.key: choice.name for choice in CHOICES} | {"single": "one process"}
KINDS = {choice.kind: choice.name for choice in reversed(CHOICES) if not choice.axes}


@dataclass(frozen=True)
class PublishedModel:
    """A model of models.yaml, whose first lines explain these fields."""

    hub: str
    config: str = ""
    parameters: int = 0
    published: str = ""
    beside: str = ""
    revision: str | None = None
    template: str | None = None
    rope_parameters: Fields | None = None
    base: bool = False
    licence: str = ""

    @property
    def name(self) -> str:
        return self.hub.rpartition("/")[2]


@functools.cache
def published_models() -> dict[str, PublishedModel]:
    """Return the model of each folder of recipes/."""
    entries = table(Path(__file__).with_name("models.yaml"))
    return {name: PublishedModel(**entry) for name, entry in entries.items()}


def published_model(name: str) -> PublishedModel:
    """Return a model by its name on the Hub, or by a folder of recipes/.

    A model that nobody has described has only its name: a folder elsewhere, or another owner's model, may hold anything although
    it is called like one of ours.
    """
    found = next((model for model in published_models().values() if model.hub == name), None)
    if found:
        return found
    path = Path(name).expanduser()
    if "/" not in name and not path.exists():
        path = known_config(name) or path
    folder = (path.parent if path.is_file() else path).resolve()
    ours = folder.parent == RECIPES and folder.name in published_models()
    return published_models()[folder.name] if ours else PublishedModel(name)


def hosts_of(settings: Settings) -> dict[str, int]:
    """Return the slots of each host of the recipe's cluster; one host with one GPU where it names no hostfile."""
    named = settings.recipe.cluster.hostfile
    return read_hostfile(find(named, settings.place("hostfile"), "hostfile")) if named else {"this host": 1}


def strategy_of(settings: Settings) -> Strategy:
    """The strategy of a recipe on the hosts that it names."""
    hosts = hosts_of(settings)
    first = next(iter(hosts))
    return choose(settings, World(0, 0, sum(hosts.values()), hosts[first], first, "plan"), env={})


def job_of(
    settings: Settings,
    link: str = "",
    strategy: Strategy | None = None,
    slots: dict[str, int] | None = None,
    kind: str = "",
    asked: Asked = NOT_ASKED,
) -> Job:
    """Return the recipe as a Job, packed full, on its own cluster or on hosts with these slots, by the strategy chosen there.

    link: the network between hosts, "" for the recipe's own or the usual one; kind: of GPU, "" for the recipe's
    asked: what is known of its images, if it has some

    Raises UserError for what the run would refuse, or no formula covers.
    """
    model, training, cluster = settings.recipe.model, settings.recipe.training, settings.recipe.cluster
    beside = settings.recipe_path.with_name(BESIDE)
    config, place, name = named_config(str(beside.parent) if beside.is_file() else model.model_name_or_path)
    hold_name(cluster.network or "", settings.place("network"))
    hosts, seen = slots or hosts_of(settings), settings.recipe.data.images
    if asked and not seen:
        problem = "flags say how many images samples have, and this recipe reads none"
        raise UserError(str(settings.recipe_path), problem, "set data.images: true, or leave the flags out")
    shape = described_with_tower(config, place, name)[0] if seen else described(config, place, name)
    new = len(model.add_tokens + model.add_special_tokens)  # as if no row of the model were to spare
    if new:
        config = with_vocabulary(config, grown_vocabulary(shape.vocab, shape.vocab + new))
    ranks, node = sum(hosts.values()), max(hosts.values())
    size, kind = settings.place("global_batch_size"), kind or cluster.gpu or "H100 80GB"
    strategy = strategy or strategy_of(settings)
    shares, ranks = strategy.axes.data(ranks), ranks // strategy.replicas
    batch = batch_arithmetic(training, shares, size)
    try:
        count = counting(strategy, ranks, node, config, gpu(kind), place, asked)
        if settings.by_memory and not seen:  # a run knows nothing of its images, and takes what takes the least
            settings = settings.deciding(*fastest_fit(settings.recipe, settings.by_memory, strategy, batch, count))
        if training.per_device_train_batch_size == "auto":
            fits = largest_fit(settings.recipe, strategy, batch, count)
            batch = batch_arithmetic(training, shares, size, *fits)
        job = job_of_run(settings.recipe, strategy, batch, ranks, node, config, kind, place=place, asked=asked)
    except NotCovered as error:
        raise UserError(str(settings.recipe_path), str(error), "estimate another strategy or method") from None
    return replace(job, shape=replace(job.shape, name=shape.name), link=link or job.link)


def too_large(settings: Settings, strategy: Strategy, hosts: dict[str, int]) -> str | None:
    """Say why a recipe does not fit on these hosts' GPUs, not even with the smallest micro-batch.

    None where it may, where no formula covers it, and where the recipe names no GPU.
    """
    if settings.recipe.cluster.gpu is None:
        return None
    device = gpu(settings.recipe.cluster.gpu)
    try:
        result = estimate(job_of(settings, strategy=strategy, slots=hosts))
    except UserError:
        return None
    if result.may_fit:
        return None
    return f"the planner counts {result.device_gib:.0f} GiB on each {device.kind}, which has {device.memory_gib:.0f}"


@dataclass(frozen=True)
class RecipePlan:
    """A recipe with its estimate.

    link: the network between hosts, "" for the recipe's own or the GPU kind's usual one
    goes_to: where a recipe will lie that is not there yet
    asked: what is known of its images, if it has some
    """

    settings: Settings
    link: str = ""
    goes_to: Path | None = None
    asked: Asked = NOT_ASKED

    @property
    def path(self) -> str:
        """The path by which commands name the recipe."""
        return here(self.goes_to or self.settings.recipe_path)

    @functools.cached_property
    def estimate(self) -> Estimate:
        return estimate(job_of(self.settings, self.link, asked=self.asked))

    @functools.cached_property
    def strategy(self) -> Strategy:
        return strategy_of(self.settings)

    @property
    def strategy_name(self) -> str:
        """The strategy's name in the table of `plan`, or its own file's name."""
        if self.strategy.axes:
            return with_sizes(KINDS[self.strategy.kind], self.strategy.axes)
        offloads = " offload" if self.strategy.fsdp.get("cpu_offload") else ""
        return STRATEGIES.get(self.strategy.name, self.strategy.name) + offloads

    @property
    def model(self) -> PublishedModel:
        return published_model(self.settings.recipe.model.model_name_or_path)

    @property
    def cluster(self) -> str:
        """The cluster in words, `2 x 8 H100 80GB`, with its network where the recipe names one."""
        slots, kind, network = hosts_of(self.settings).values(), self.estimate.gpu.kind, self.estimate.job.link
        between = f", {network} between hosts" if network and len(slots) > 1 else ""
        return f"1 {kind}" if sum(slots) == 1 else f"{Cluster.of(kind, slots).title} {kind}{between}"


def load_plan(path: Path, link: str = "", goes_to: Path | None = None) -> RecipePlan:
    """The plan of the recipe at `path`. link, goes_to: as in RecipePlan"""
    return RecipePlan(flags.load(["--recipe", str(path)], loads_model=False), link, goes_to)


def here(path: Path) -> str:
    """Return a path as commands in the repository name it."""
    full = path.resolve()
    return str(full.relative_to(REPOSITORY)) if full.is_relative_to(REPOSITORY) else str(path)
