"""Model states in bytes per rank, by formula. docs/evidence/states.md compares them with what is measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

# Bytes per parameter of an optimizer's own states in fp32 (moments, momentum). 0 where they are paged: bitsandbytes' lie in
# memory that CUDA moves to the host at need, of which torch counts nothing.
OPTIMIZER_BYTES: dict[str, int] = {
    "adamw_torch": 8,
    "adamw_torch_fused": 8,
    "lamb": 8,
    "lars": 4,
    "sgd": 0,
    "adamw_8bit": 2,
    "paged_adamw_8bit": 0,
    "paged_adamw_32bit": 0,
    "lion_32bit": 4,
    "lion_8bit": 1,
    "paged_lion_32bit": 0,
    "paged_lion_8bit": 0,
    "adafactor": 0,  # of a matrix sums of its rows and of its columns, a thousandth
    "muon": 4,
    "schedule_free_adamw": 8,
}
# What an optimizer has more of parameters that are no matrices: Muon leaves embeddings, head and vectors to AdamW, and Adafactor
# has one second moment for each element of a vector.
_BESIDE_MATRICES = {"muon": 4, "adafactor": 4}
SUB_GROUP_SIZE = 10**9  # elements of ZeRO-3's shard that are stepped at once: DeepSpeed's default


def optimizer_bytes(optim: str, beside: float = 1.0) -> float:
    """Return the bytes per parameter of an optimizer's own states.

    beside: the share of parameters that the optimizer does not take for matrices; by default the most
    """
    return OPTIMIZER_BYTES.get(optim, 8) + _BESIDE_MATRICES.get(optim, 0) * beside


@dataclass(frozen=True)
class StateBytesPerRank:
    """Bytes. optimizer: its own states and, under DeepSpeed, the fp32 master copy of the parameters."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def model_states(
    kind: str,
    parameters: int,
    ranks: int,
    half: bool,
    optim: str = "adamw_torch_fused",
    *,
    cut: int = 0,
    hpz: int = 0,
    frozen: float = 0,
    adapters: bool = True,
    beside: float = 1.0,
) -> StateBytesPerRank:
    """What one rank holds of a model with `parameters` trained parameters, sharded over `ranks` ranks.

    kind: single, ddp, zero1, zero2, zero3, fsdp2 (hsdp: fsdp2 with `ranks` = its shard group)
    half: bf16 or fp16. DDP and FSDP2 keep fp32 weights and cast for the computation.
    cut: a rank's figure of cut_parameters(): ZeRO-1 and 2 keep the whole gradient of a parameter that a slice cuts
    hpz: ranks of one host, under ZeRO++'s zero_hpz_partition_size
    frozen: bytes of weights that are not trained: they have neither gradients nor states, and lie as trained ones do.
        QLoRA's quantisation constants are whole on every rank (0.13 bits per parameter, 0.5 if not nested).
    beside: as of optimizer_bytes(); by default the most
    adapters: whether those weights are under adapters, and not beside a decoder that is trained whole (a vision tower)

    The base is Rajbhandari et al. 2020 (arXiv 1910.02054, table 1): with P parameters and mixed precision 2P weights,
    2P gradients and 12P optimizer states, of which ZeRO-1, 2 and 3 shard the last, the last two and all.
    What differs in DeepSpeed (runtime/zero/), in fp32 training too:
    - Gradients are accumulated in the weights' precision and copied into fp32 for the step, and the first copy stays until
      the step's end (stage_1_and_2.py: step, stage3.py: _prepare_fp32_grad_for_sub_group): (2 + 4) P/N. ZeRO-3 makes the second
      copy per sub-group.
    - ZeRO-1 reduces gradients after the last micro-batch; until then every rank holds all of them.
    - There is an fp32 master copy.
    - Of adapters the first copy is gone by then, and ZeRO-1 and 2 keep none of what a slice cuts (docs/evidence/states.md).
    FSDP2 has none, and 16/N in any precision, as train.py has it reduce in every micro-step.
    """
    own = optimizer_bytes(optim, beside)
    share = parameters / ranks
    weight = 2 if half else 4
    if kind in ("single", "ddp"):
        return StateBytesPerRank(4 * parameters + frozen, 4 * parameters, own * parameters)
    if kind in ("fsdp2", "hsdp"):
        return StateBytesPerRank(4 * share + frozen / ranks, 4 * share, own * share)
    optimizer = (4 + own) * share
    if kind == "zero3":
        copies = weight * share + frozen / ranks + ((weight * parameters + frozen) / hpz if hpz else 0)
        return StateBytesPerRank(copies, weight * share + 4 * min(share, SUB_GROUP_SIZE), optimizer)
    gradients = 4 * share + (0 if frozen and adapters else weight * (share + cut))
    if kind == "zero1":
        gradients = max(gradients, weight * parameters)
    return StateBytesPerRank(weight * parameters + frozen, gradients, optimizer)


def cut_parameters(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return, for each rank, the elements beyond its slice of the parameters that reach into it.

    ZeRO-1 and 2 lay all parameters in one row and cut it into `ranks` equal slices, through parameters.
    sizes: elements of each parameter, in the model's order.
    """
    slice_ = -(-sum(sizes) // ranks)
    spans = [(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    touched = (
        sum(end - start for start, end in spans if start < (rank + 1) * slice_ and end > rank * slice_)
        for rank in range(ranks)
    )
    return [max(0, elements - slice_) for elements in touched]
