"""The question of a search and its answer: a cluster, what to train on it, the strategies of train.py as the planner sees them,
and one of them with its estimate."""

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import UserError, did_you_mean
from ...errors.tables import table
from ...train.recipe.objectives import ADAPTERS_OFF, MODEL, OBJECTIVES, PAIRS, SFT
from ...train.strategy import refusal
from ...train.strategy.axes import Axes
from ..costs.estimate import Estimate
from ..costs.job import EAGER, FUSED, Comparison, Images, Kernels
from ..shape.model_shape import ModelShape

_TABLES = table(Path(__file__).with_name("strategies.yaml"))
_SIZES = re.compile(r" \d+(?: \(\d+ each\))?(?= x )")  # of axes, as a table has them: `PP 8 (2 each) x ZeRO-1`
SHORT = {"tensor": "TP", "sequence": "SP", "stages": "PP", "experts": "EP"}  # of axes, in tables and names of files


@dataclass(frozen=True)
class Choice:
    """One strategy.

    engine, stage: as of a Job; group: "node" where states are sharded inside a node and replicated across
    offload: what lies in the host's memory ("optimizer", or "all": parameters too) or on its disks ("nvme")
    file: the ds_config; "" for DDP, "fsdp2", "fsdp2_offload" and "hsdp" where an accelerate config says it
    axes: of train/strategy/axes.py, what it divides besides the data
    least_length: tokens of a sequence from which on it is offered
    quantised: what it sends is rounded to 8 and 4 bits
    unproven: few have published runs of its axes
    rank: how much there is to understand and to go wrong; of two that are about as fast the planner takes the lower
    """

    name: str
    engine: str
    stage: int
    file: str
    rank: int
    group: str = ""
    offload: str = ""
    axes: tuple[str, ...] = ()
    least_length: int = 0
    quantised: bool = False
    unproven: bool = False

    @property
    def key(self) -> str:
        """The name that a flag takes: in small letters without spaces and dashes, as in tp_zero1 and zero3_offload_param.

        Where no axis divides the model, it is its file's name without the ending, as in a run's directory.
        """
        return _key(self.name)

    @property
    def undivided(self) -> "Choice":
        """The strategy that replicates or shards alike in one group of all GPUs, without an axis."""
        plain = {choice.name: choice for choice in CHOICES}
        base = self.name.rpartition(" x ")[2]
        return plain[{"HSDP": "FSDP2", "ZeRO-3 hpZ": "ZeRO-3", "ZeRO++": "ZeRO-3"}.get(base, base)]

    @property
    def kind(self) -> str:
        """The kind of the Strategy that it is in a run."""
        return f"zero{self.stage}" if self.engine == "zero" else "hsdp" if self.file == "hsdp" else self.engine

    @property
    def why_only(self) -> str:
        """Why it is only estimated, and never chosen; "" for a strategy that may be chosen."""
        return "it rounds what it sends, which no GPU has tried here" if self.quantised else ""

    def named(self, axes: Axes) -> str:
        """Return its name with the sizes of its axes: `TP 8 x PP 2 x ZeRO-1`."""
        return with_sizes(self.name.rpartition(" x ")[2], axes)


def _key(name: str) -> str:
    return name.lower().replace(" x ", "_").replace(" ", "_").replace("-", "").replace("+", "p")


def with_sizes(name: str, axes: Axes) -> str:
    """Return a name with the sizes of axes before it; of a pipeline with several stages on each rank, `PP 8 (2 each)`."""
    sizes = {axis: f"{SHORT[axis]} {size}" for axis, size in axes.used.items()}
    if axes.virtual > 1:
        sizes["stages"] += f" ({axes.virtual} each)"
    return " x ".join([*sizes.values(), name])


def _choices() -> Iterable[Choice]:
    plain = {row["name"]: Choice(**row) for row in _TABLES["strategies"]}
    yield from plain.values()
    for row in _TABLES["divided"]:
        for base in map(plain.__getitem__, row["beside"]):
            name = " x ".join([*(SHORT[axis] for axis in row["axes"]), base.name])
            more = {key: value for key, value in row.items() if key != "beside"}
            yield replace(base, **more | {"name": name, "axes": tuple(row["axes"]), "rank": base.rank + row["rank"]})


CHOICES = tuple(_choices())
UNPROVEN = frozenset(choice.axes for choice in CHOICES if choice.unproven)


def runs(choice: Choice, **facts: object) -> bool:
    """Return whether train.py takes a strategy with such a `method` and recipe's keys (train/strategy/refused.yaml)."""
    host_shards = choice.engine == "fsdp2" and bool(choice.offload)
    return refusal(kind=choice.kind, host_shards=host_shards, **dict.fromkeys(choice.axes, True), **facts) is None


def named(words: Iterable[str], optimizer: str) -> tuple[Choice, ...]:
    """Return the strategies of those names (`zero3`, `ZeRO-3`, `ds_configs/zero3.json`), or all.

    Those that train.py does not run with that optimizer are left out. A name may be as the table of `plan` prints it, without the
    sizes of axes.

    Raises UserError for an unknown name, or where none is left.
    """
    keys = {choice.key: choice for choice in CHOICES}
    keys |= {_key(choice.file): choice for choice in CHOICES if choice.file and not choice.axes}
    words = list(words)
    unknown = [word for word in words if _key(word) not in keys]
    if unknown:
        without = _key(_SIZES.sub("", unknown[0]))
        cure = f"write {without}: plan tries every size" if without in keys else did_you_mean(unknown[0], keys)
        raise UserError("flag --strategy", f"unknown strategy {unknown[0]!r}", cure)
    choices = [keys[_key(word)] for word in words] or CHOICES
    found = tuple(dict.fromkeys(choice for choice in choices if runs(choice, optim=optimizer)))
    if found:
        return found
    names = " or ".join(choice.name for choice in choices)
    if any(runs(choice, optim="adamw_torch_fused") for choice in choices):
        problem = f"train.py does not run {optimizer} under {names}"
        raise UserError("flag --optim", problem, "use adamw_torch_fused, or another strategy")
    raise UserError("flag --strategy", f"train.py does not run {names}", "leave it out to see what it runs")


MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
KERNELS: dict[str, tuple[Kernels, str]] = {
    name: (FUSED if row["fused"] else EAGER, row["loss"]) for name, row in _TABLES["kernels"].items()
}
WITH_LIGER = tuple(name for name in KERNELS if name.startswith("Liger"))  # a package of requirements-gpu.txt
INSTALLED = tuple(name for name in KERNELS if name not in WITH_LIGER)


def usual_comparison(objective: str, adapters: bool) -> Comparison:
    """Return the comparison of a recipe that names an objective and no reference. objective: a key of OBJECTIVES"""
    known = OBJECTIVES[objective]
    reference = (ADAPTERS_OFF if adapters else MODEL) if known.reference else ""
    return Comparison(objective, known.rows, reference, reference == MODEL)


def powers_below(number: int) -> list[int]:
    """Return the powers of two below a number, 1 among them."""
    return [2**power for power in range((number - 1).bit_length())]


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind on `nodes` nodes of `node_size`.

    link: the network's name or rate, "" for the kind's usual one
    host_gib, nvme_gb: memory and local disks of a node, 0 for what is usual
    all: GPUs on all nodes, where some have less than `node_size`; 0: each has as many
    """

    gpu: str
    node_size: int
    nodes: int
    link: str = ""
    host_gib: float = 0.0
    nvme_gb: float = 0.0
    all: int = 0

    @classmethod
    def of(cls, gpu: str, slots: Collection[int], **more: Any) -> "Cluster":
        """Return the cluster of hosts with these slots. more: the fields beside them"""
        return cls(gpu, max(slots), len(slots), all=sum(slots) if len(set(slots)) > 1 else 0, **more)

    @property
    def gpus(self) -> int:
        return self.all or self.node_size * self.nodes

    @property
    def fewer(self) -> list[int]:
        """The numbers of hosts to try beside all: half as many each time; where slots are unequal only the largest host."""
        return [1] if self.all else powers_below(self.nodes)

    def batch(self, micro: int, method: str = "full") -> int:
        """Return a global batch: 128 sequences, or more that divide over the GPUs, and if they stay few over fewer hosts' too.

        Adapters lose more by a large batch than all weights do, of any rank (thinkingmachines.ai/blog/lora): theirs has four
        sequences for each GPU, which a micro-batch is filled with, 16 at least and 128 at most.
        """
        wanted = 128 if method == "full" else min(max(16, 4 * self.gpus), 128)
        least = micro * self.gpus
        every = micro * math.lcm(self.gpus, max(self.fewer, default=1) * self.node_size)
        least = every if every <= 512 else least
        return -(-max(wanted, least) // least) * least

    @property
    def title(self) -> str:
        return f"{self.all} GPUs on {self.nodes} hosts," if self.all else f"{self.nodes} x {self.node_size}"


@dataclass(frozen=True)
class Workload:
    """What to train: samples of `length` tokens at most, `batch` sequences of them per optimizer step.

    method: a key of METHODS; objective: one of OBJECTIVES, of which those over pairs have two samples in a sequence
    trained: parameters of adapters of `rank` and of `whole`, modules trained whole beside them; 0 for all weights
    margin: share of each card to leave free; images: those of a sample, if it has some
    choices, micro_batches (the smallest first), kernels (keys of KERNELS): what the search is among
    asked: whether the user has named the strategies, for then one that is slow is taken, too
    optimizer: "" for the usual one, or where that does not fit without offload one with 8-bit moments
    """

    shape: ModelShape
    length: int = 4096
    batch: int = 128
    method: str = "full"
    trained: int = 0
    kernels: tuple[str, ...] = INSTALLED
    margin: float = 0.05
    choices: tuple[Choice, ...] = CHOICES
    asked: bool = False
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    optimizer: str = ""
    rank: int = 16
    whole: tuple[str, ...] = ()
    objective: str = SFT
    images: Images | None = None

    @property
    def comparison(self) -> Comparison:
        return usual_comparison(self.objective, self.method != "full")

    @property
    def sequence(self) -> int:
        """Tokens of a sequence."""
        return self.length * self.comparison.asks_for.samples

    @property
    def packed(self) -> bool:
        """Whether `plan --write` packs its samples: attention by masks computes the products between them, too."""
        return self.objective == SFT and not self.shape.masked

    @property
    def pairs(self) -> bool:
        return OBJECTIVES[self.objective].rows == PAIRS


@dataclass(frozen=True)
class Candidate:
    """A strategy with its best micro-batch, checkpointing and kernels.

    refused: why it is not to be taken, whatever it needs of a GPU; told: whether the user has described what it offloads to
    lighter: its optimizer keeps less than the one that is usual, because that does not fit
    asked: whether the user has named its strategy
    """

    choice: Choice
    kernels: str
    estimate: Estimate
    margin: float
    refused: str = ""
    told: bool = False
    lighter: bool = False
    asked: bool = False

    @property
    def name(self) -> str:
        """The strategy's name with the sizes of its axes, and with an optimizer that was not asked for."""
        job = self.estimate.job
        return self.choice.named(job.axes) + (f", {job.optimizer}" if self.lighter else "")

    @property
    def seconds(self) -> float:
        return self.estimate.time.total

    @property
    def slow_seconds(self) -> float:
        """Seconds at the slow end of the interval, on a network that gives what it is named for, as `seconds` has it."""
        return self.seconds * self.estimate.time_interval()[1] / self.estimate.one_card_seconds

    @property
    def recommended(self) -> bool:
        """Whether it may be chosen: what is slow where the user has named it, and what no GPU has tried never."""
        return self.fits and not self.choice.why_only and (self.asked or not self.estimate.slow)

    @property
    def weighed(self) -> bool:
        """Whether its offload is compared with what fits without it: adapters leave little to offload."""
        return self.told and self.estimate.job.method == "full"

    @property
    def keeps_margin(self) -> bool:
        """Whether the expected figure leaves the margin of a card free."""
        return self.estimate.spare_gib >= self.margin * self.estimate.gpu.memory_gib

    @property
    def fits(self) -> bool:
        """Whether it keeps the margin, and fits at the upper ends of its memory's intervals, a GPU's and a host's."""
        return self.keeps_margin and self.estimate.fits and not self.refused
