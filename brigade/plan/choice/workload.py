"""The question of a search and its answer: a cluster, what to train on it, and a strategy with its estimate."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ...train.recipe.objectives import OBJECTIVES, PAIRS, SFT
from ..costs.estimate import Estimate
from ..costs.job import EAGER, FUSED, Comparison, Images, Kernels, usual_comparison
from ..shape.model_shape import ModelShape
from .strategies import CHOICES, Choice

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
KERNELS: dict[str, tuple[Kernels, str]] = {
    "torch": (EAGER, "released"),
    "torch.compile": (FUSED, "online"),
    "torch, loss in tiles": (EAGER, "tiled"),
    "Liger": (FUSED, "released"),  # train.py leaves out Liger's own loss (train/engines/kernels.py: apply_liger)
    "Liger, loss in tiles": (FUSED, "tiled"),
}
WITH_LIGER = tuple(name for name in KERNELS if name.startswith("Liger"))  # a package of requirements-gpu.txt
INSTALLED = tuple(name for name in KERNELS if name not in WITH_LIGER)


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
        return [1] if self.all else [2**power for power in range(10) if 2**power < self.nodes]

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
        return self.choice.named(self.estimate.job.axes) + self.with_optimizer

    @property
    def label(self) -> str:
        """The name without sizes, which is the same on every number of hosts."""
        return self.choice.name + self.with_optimizer

    @property
    def with_optimizer(self) -> str:
        return f", {self.estimate.job.optimizer}" if self.lighter else ""

    @property
    def seconds(self) -> float:
        return self.estimate.time.total

    @property
    def slow_seconds(self) -> float:
        """Seconds at the slow end of the interval, on a network that gives what it is named for, as `seconds` has it."""
        return self.seconds * self.estimate.time_interval()[1] / self.estimate.one_card_seconds

    @property
    def slow(self) -> bool:
        return self.estimate.slow

    @property
    def recommended(self) -> bool:
        """Whether it may be chosen: what is slow where the user has named it, and what no GPU has tried never."""
        return self.fits and not self.choice.why_only and (self.asked or not self.slow)

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
