"""A recipe as a configuration to estimate, and where its model comes from. No torch."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from ..cluster import World, read_hostfile
from ..errors import UserError
from ..flags import Settings
from ..recipe import REPOSITORY, batch_arithmetic, find
from ..strategy import Strategy, choose
from .adapters import ALL, lora_parameters, targets_of
from .job import Job, Method
from .names import described, named_config
from .runs import NoPromise, job_of_run
from .shape import ModelShape

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

    def trained_whole(self, shape: ModelShape) -> list[str]:
        """What adapters alone would not teach: a base model's embeddings of its chat template's tokens (docs/data.md).

        Two ends that share a weight cannot be trained apart; there adapters are all there is.
        """
        return ["embed_tokens", "lm_head"] if self.base and not shape.tied else []


@functools.cache
def sources() -> dict[str, Source]:
    """Folder of recipes/ -> its model."""
    text = Path(__file__).with_name("models.yaml").read_text()
    return {name: Source(**entry) for name, entry in yaml.safe_load(text).items()}


def source_of(name: str) -> Source:
    """By the folder's name, or by the Hub's; what nobody has described goes by its name alone."""
    plain = name.rstrip("/").rpartition("/")[2].lower()
    return sources().get(plain) or next((s for s in sources().values() if name == s.hub), Source(name))


def trained_parameters(shape: ModelShape, method: Method, rank: int, whole: list[str], targets: str = ALL) -> int:
    """Of adapters and of the ends that are trained whole beside them; 0: all."""
    if method == "full":
        return 0
    return lora_parameters(shape, rank, targets) + sum(shape.vocab * shape.hidden for _ in whole)


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
    method: Method = "qlora" if model.load_in_4bit else "lora" if model.use_peft else "full"
    targets = targets_of(model.lora_target_modules)
    trained = trained_parameters(shape, method, model.lora_r, model.lora_modules_to_save, targets)
    batch = batch_arithmetic(training, ranks, settings.place("global_batch_size"))
    try:
        job = job_of_run(settings.recipe, strategy_of(settings), batch, ranks, node, config, cluster.gpu or "H100 80GB",
                         trained=trained, place=place)  # fmt: skip
    except NoPromise as error:
        raise UserError(str(settings.recipe_path), str(error), "estimate another strategy or method") from None
    return replace(job, shape=replace(job.shape, name=shape.name), link=link)


def here(path: Path) -> str:
    """A path as commands in the repository name it."""
    full = path.resolve()
    return str(full.relative_to(REPOSITORY)) if full.is_relative_to(REPOSITORY) else str(path)
