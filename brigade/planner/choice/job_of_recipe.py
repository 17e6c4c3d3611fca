"""A recipe as a configuration to estimate, and where its model comes from. No torch."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from ...cluster import World, read_hostfile
from ...errors import UserError
from ...recipe.batch import batch_arithmetic
from ...recipe.files import REPOSITORY, find
from ...recipe.flags import Settings
from ...strategy import Strategy, choose
from ..costs.hardware import gpu
from ..models.find_model import RECIPES, config_of, described, named_config
from .job import Job
from .job_of_run import NoPromise, job_of_run, largest_fit

BESIDE = "config.json"


@dataclass(frozen=True)
class Source:
    """What models.yaml, whose first lines explain it, says of a model."""

    hub: str
    config: str = ""
    parameters: int = 0
    published: str = ""
    revision: str | None = None
    template: str | None = None
    base: bool = False
    licence: str = ""

    @property
    def name(self) -> str:
        return self.hub.rpartition("/")[2]


@functools.cache
def sources() -> dict[str, Source]:
    """Folder of recipes/ -> its model."""
    text = Path(__file__).with_name("models.yaml").read_text()
    return {name: Source(**entry) for name, entry in yaml.safe_load(text).items()}


def source_of(name: str) -> Source:
    """By its name on the Hub, or by a folder of recipes/. What nobody has described goes by its name alone: a folder
    elsewhere, or another owner's model, that is called as one of ours may hold anything."""
    if found := next((source for source in sources().values() if source.hub == name), None):
        return found
    ours = "/" not in name or Path(name).expanduser().exists()
    folder = config_of(name).resolve().parent if ours else Path(name)
    return sources()[folder.name] if folder.parent == RECIPES and folder.name in sources() else Source(name)


def hosts_of(settings: Settings) -> dict[str, int]:
    """Host -> slots of the recipe's cluster; one host with one GPU where it names no hostfile."""
    named = settings.recipe.cluster.hostfile
    if not named:
        return {"this host": 1}
    return read_hostfile(find(named, settings.place("hostfile"), "hostfile"))


def strategy_of(settings: Settings) -> Strategy:
    hosts = hosts_of(settings)
    first = next(iter(hosts))
    return choose(settings, World(0, 0, sum(hosts.values()), hosts[first], first, "plan"), env={})


def job_of(settings: Settings, link: str = "") -> Job:
    """The recipe on its own cluster, packed full. link: the network between hosts, "" for the GPU kind's usual one.

    Raises UserError for what the run would refuse, or no formula covers.
    """
    model, training, cluster = settings.recipe.model, settings.recipe.training, settings.recipe.cluster
    beside = settings.recipe_path.with_name(BESIDE)
    config, place, name = named_config(str(beside.parent) if beside.is_file() else model.model_name_or_path)
    hosts, shape = hosts_of(settings), described(config, place, name)
    ranks, node = sum(hosts.values()), max(hosts.values())
    size, kind, strategy = settings.place("global_batch_size"), cluster.gpu or "H100 80GB", strategy_of(settings)
    batch = batch_arithmetic(training, ranks, size)
    try:
        if training.per_device_train_batch_size == "auto":
            fits = largest_fit(settings.recipe, strategy, batch, ranks, node, config, gpu(kind), place)
            batch = batch_arithmetic(training, ranks, size, *fits)
        job = job_of_run(settings.recipe, strategy, batch, ranks, node, config, kind, place=place)
    except NoPromise as error:
        raise UserError(str(settings.recipe_path), str(error), "estimate another strategy or method") from None
    return replace(job, shape=replace(job.shape, name=shape.name), link=link)


def here(path: Path) -> str:
    """A path as commands in the repository name it."""
    full = path.resolve()
    return str(full.relative_to(REPOSITORY)) if full.is_relative_to(REPOSITORY) else str(path)
