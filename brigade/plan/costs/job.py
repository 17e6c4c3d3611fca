"""One configuration to estimate: model, method, how it is spread over GPUs, and what computes it."""

from dataclasses import dataclass, replace
from typing import Literal

from ...errors import UserError
from ...errors.tables import Fields
from ...train.recipe.method import METHODS
from ...train.recipe.objectives import MODEL, OBJECTIVES, SFT
from ...train.strategy.axes import Axes
from ..shape.image_tokens import Image
from ..shape.model_shape import ModelShape
from ..shape.tower import Tower
from .conventions import ENGINES, ROWS, SCHEDULES, Engine, Rows, Schedule

Kernels = frozenset[str]  # of "norm", "rotary", "mlp", "experts", "softmax": which of them are one kernel each
EAGER: Kernels = frozenset()
FUSED: Kernels = frozenset(("norm", "rotary", "mlp"))
Attention = Literal["eager", "flash1", "flash2", "flash3", "flash4"]
Method = Literal["full", "lora", "qlora"]
Checkpointing = Literal["none", "attention", "half", "selective", "full"]
VISION_TOWER, PROJECTOR = "vision_tower", "projector"  # parts of a model that reads images
RANKS = ("data", "tensor", "pipeline", "context", "expert")


def method_fields(name: str) -> Fields:
    """Return the fields of a Job for a method. name: a key of METHODS"""
    keys = METHODS[name].keys
    return {"method": "qlora" if "load_in_4bit" in keys else "lora" if keys else "full", "dora": "use_dora" in keys}


def unset(*names: str) -> Fields:
    """Return these fields of a Job as they are where nothing is said of them."""
    return {name: Job.__dataclass_fields__[name].default for name in names}


def axis_fields(axes: Axes, ranks: int) -> Fields:
    """Return the fields of a Job that train.py divides along these axes over so many ranks."""
    if not axes:
        return {"data": ranks}
    pipeline = {"engine": "stages", "schedule": axes.chosen_schedule, "virtual": axes.virtual}
    return (pipeline if axes.stages > 1 else {}) | {
        "data": axes.data(ranks),
        "tensor": axes.tensor,
        "pipeline": axes.stages,
        "context": axes.sequence,
        "expert": axes.experts,
    }


@dataclass(frozen=True)
class Replicas:
    """Groups of ranks that train independently and average weights every `every` steps (docs/local-training.md).

    count: how many there are, 1 where nothing is averaged; precision, fragments, outer: as a recipe's keys say them
    """

    count: int = 1
    every: float = 1
    precision: str = "fp32"
    fragments: int = 1
    outer: str = "average"


@dataclass(frozen=True)
class Comparison:
    """What a run learns, and what answers are compared with for it.

    objective: a key of OBJECTIVES, or a function of the user's; rows: a key of ROWS, what the objective reads
    reference: ADAPTERS_OFF, MODEL, or "" where there is none; precomputed: it looks at all samples once, before training
    shape: of a reference that is another model; None for the weights that training begins with
    apart: samples of a sequence that lie in rows of their own, padded, and not end to end
    in_4bit: whether a second model is held so, whole on each rank
    kept: words of each supervised token that a teacher leaves on the disk, 0 where none
    """

    objective: str = SFT
    rows: str = "answers"
    reference: str = ""
    precomputed: bool = False
    shape: ModelShape | None = None
    apart: int = 1
    in_4bit: bool = False
    kept: int = 0

    @property
    def title(self) -> str:
        """The objective's name for readers."""
        return OBJECTIVES[self.objective].title if self.objective in OBJECTIVES else self.objective

    @property
    def asks_for(self) -> Rows:
        """What the rows ask for."""
        return ROWS[self.rows]

    @property
    def looks(self) -> int:
        """How often a reference looks at as many tokens as a step has: at the samples, and at the mismatched answers."""
        return (1 + self.asks_for.mismatched) * bool(self.reference)

    @property
    def stays(self) -> bool:
        """Whether a second model stays in memory for the whole run."""
        return self.reference == MODEL and not self.precomputed

    @property
    def second(self) -> bool:
        """Whether a second model is in memory at any time: for the whole run, or only before the first step."""
        return self.stays or (self.precomputed and self.shape is not None)


@dataclass(frozen=True)
class Images:
    """The images of a sequence, and what is trained of the parts that read them.

    per_sample: mean number of them in a sequence; width, height: in pixels, before the model's processor; assumed: nobody said so
    each: what one of them becomes; trained: of vision_tower and projector, those whose weights, or adapters on them, are trained
    """

    tower: Tower
    each: Image
    per_sample: float = 1.0
    width: int = 0
    height: int = 0
    assumed: bool = False
    trained: tuple[str, ...] = ()

    @property
    def tokens(self) -> float:
        """Tokens of a sequence that stand for images."""
        return self.per_sample * self.each.tokens

    @property
    def beside(self) -> int:
        """Parameters of the parts that are trained, where all weights of them are."""
        sizes = {VISION_TOWER: self.tower.parameters, PROJECTOR: self.tower.projector}
        return sum(sizes[part] for part in self.trained)


@dataclass(frozen=True)
class Job:
    """One training configuration.

    engine: a key of ENGINES; stage: what data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 and gradients, 3 and weights
    sequence: its tokens; packed: with samples end to end, so that all are so long, or else the longest one that a sample may be
    attended: mean length of the sample that a token sees (packing), 0 for the whole sequence
    labelled: share of the tokens that have logits: with padding_free only those that a label follows
    data, tensor, pipeline, context, expert: ranks of each kind of parallelism, in one of the `replicas`
    schedule, virtual: of the pipeline, a key of SCHEDULES, and its chunks per rank
    shard: ranks that share one copy of the states (0: all data-parallel ranks); hpz: those with a second copy of the weights
    quantised: weights are gathered in 8 bits and gradients reduced in 4 (ZeRO++: qwZ and qgZ)
    offload: "optimizer", "all" (under FSDP2 this only) or "nvme": what lies outside the GPU, in the host's memory or on its disks
    checkpointing: what is computed again in the backward pass: attention's scores, every other product ("half" as torchtitan's
        "selective op" has published it, "selective" as train.py keeps them), or whole layers, of which `every`-th
    inputs_on_host: what layers begin with that are computed again waits in the host's memory
    trained: parameters with gradients where adapters are trained; 0: all of the model's
    targets: what adapters lie on (shape/lora.py); adapter_dropout: whether they drop from their inputs (lora_dropout)
    dora: adapters have magnitudes (DoRA), and measure the rows of their weights in each forward pass
    tiled_mlp: MLPs are computed for as many tokens at a time as the hidden size is wide (tiled_mlp: auto)
    comparison: what is learned where that is not answers, and what it is compared with
    images: None for texts only; those of each sequence, whose tokens are among the sequence's
    loss, optimizer: keys of LOGIT_BYTES (constants.py) and OPTIMIZER_BYTES (train/strategy/state_bytes.py)
    """

    shape: ModelShape
    sequence: int
    micro_batch: int = 1
    accumulation: int = 1
    method: Method = "full"
    engine: str = "fsdp2"
    stage: int = 0
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    shard: int = 0
    hpz: int = 0
    quantised: bool = False
    offload: str = ""
    attended: float = 0
    packed: bool = True
    labelled: float = 1.0
    checkpointing: Checkpointing = "none"
    every: int = 1
    inputs_on_host: bool = False
    kernels: Kernels = EAGER
    attention: Attention = "flash2"
    loss: str = "full"
    tiled_mlp: bool = False
    trained: int = 0
    targets: str = "qkvom"
    adapter_dropout: bool = False
    dora: bool = False
    optimizer: str = "adamw_torch_fused"
    gpu: str = "H100 80GB"
    node_size: int = 8
    link: str = ""
    replicas: Replicas = Replicas()
    comparison: Comparison = Comparison()
    images: Images | None = None

    def __post_init__(self) -> None:
        for name in ("sequence", "micro_batch", "accumulation", *RANKS, "virtual", "every", "node_size"):
            if getattr(self, name) < 1:
                raise UserError(name, f"{getattr(self, name)} is not a whole number above 0", "give at least 1")
        if self.shape.heads % self.tensor:
            problem = f"{self.tensor} does not divide the model's {self.shape.heads} attention heads"
            raise UserError("tensor parallelism", problem, "use a divisor of it")
        if self.shape.mixer and self.tensor * self.context > 1:
            problem = f"no formula describes how ranks share a {self.shape.mixer.kind}"
            raise UserError("tensor and sequence parallelism", problem, "measure it with a short run instead")
        if self.shape.sizes and self.tensor * self.context * self.pipeline > 1:
            problem = "no formula describes how ranks share layers of different sizes"
            raise UserError("tensor, sequence and pipeline parallelism", problem, "measure it with a short run instead")
        if self.pipeline > self.shape.layers:
            problem = f"{self.pipeline} stages are more than the {self.shape.layers} layers"
            raise UserError("pipeline parallelism", problem, "use fewer stages")
        if self.images:
            self._check_images(self.images)

    def _check_images(self, images: Images) -> None:
        """Raise UserError for images under what no formula counts them with, and for more than a sequence has room for."""
        reasons = {
            f"{self.axes} parallelism": self.pipeline * self.expert > 1,
            "replicas that train independently": self.replicas.count > 1,
            f"objective {self.comparison.objective}": self.comparison.objective != SFT,
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            raise UserError("images", f"no formula counts them with {reason}", "leave one of the two out")
        if images.tokens > self.sequence:
            problem = f"{images.per_sample:g} of {images.each.tokens:,} tokens are more than a sequence"
            cure = "give a larger max_length, or fewer or smaller images"
            raise UserError("images", f"{problem} of {self.sequence:,}", cure)

    @property
    def alike(self) -> "list[tuple[Job, float]]":
        """(the job with layers of one kind only, their share) of each kind of layers that differ in sizes; else the job."""
        if not self.shape.sizes:
            return [(self, 1.0)]
        return [(replace(self, shape=shape), share) for shape, share in self.shape.alike]

    @property
    def title(self) -> str:
        """The objective, where it is not supervised fine-tuning, and the method in words, for readers."""
        method = METHODS[self.method.replace("lora", "dora") if self.dora else self.method].title
        return method if self.comparison.objective == SFT else f"{self.comparison.title}, {method}"

    @property
    def conventions(self) -> Engine:
        return ENGINES[self.engine]

    @property
    def deepspeed(self) -> bool:
        """Whether DeepSpeed trains it, in any version."""
        return self.engine.startswith("zero")

    @property
    def frozen_beside(self) -> int:
        """Parameters beside the decoder that full fine-tuning leaves as they are."""
        return self.shape.other - (self.images.beside if self.images else 0)

    @property
    def order(self) -> Schedule:
        """The order in which a stage goes through its micro-batches."""
        return SCHEDULES[self.schedule]

    @property
    def axes(self) -> Axes:
        """The axes besides data parallelism, with their sizes."""
        schedule = "" if self.schedule in ("1f1b", "interleaved1f1b") else self.schedule
        return Axes(self.tensor, self.context, self.pipeline, self.expert, schedule, self.virtual)

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context * self.replicas.count

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.node_size)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.sequence // self.context

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch * self.sequence * self.accumulation * self.data * self.replicas.count

    @property
    def shard_ranks(self) -> int:
        return self.shard or self.data * self.context

    @property
    def length(self) -> float:
        return self.attended or self.sequence

    @property
    def adapter_copies(self) -> bool:
        """Whether adapters are in fp32 and read copies, as under any engine but DeepSpeed (train/model/adapters.py, PEFT)."""
        return self.conventions.weights == 4

    @property
    def by_masks(self) -> bool:
        """Whether SDPA's memory-efficient kernel computes attention.

        FlashAttention takes no masks, which images need whose tokens see each other, and no heads wider than 256.
        """
        of_images = self.images is not None and self.images.tower.masks
        return self.attention != "eager" and (self.shape.masked or of_images)

    @property
    def one_kernel_norm(self) -> bool:
        """Whether a norm is one kernel, which keeps its input and no fp32 copy of it."""
        return "norm" in self.kernels or self.shape.family.layer_norm

    @property
    def driver(self) -> str:
        """Whose code computes, a key of conventions.DRIVERS."""
        return "fused" if "norm" in self.kernels else "eager"

    @property
    def autocast(self) -> bool:
        """Whether bf16 products read fp32 weights, with an fp32 residual stream; frozen weights are bf16 under every engine."""
        return self.engine in ("ddp", "stages") and self.method == "full"

    @property
    def scored(self) -> float:
        """Mean over layers with attention of the tokens that it computes scores for, per token: eager attention skips none."""
        s = self.shape
        if self.attention == "eager":
            return self.sequence / self.comparison.apart
        return s.attended(self.length) / s.attending
