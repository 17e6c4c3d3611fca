"""Model states in bytes per rank, by formula."""

from dataclasses import dataclass

# Bytes per parameter of an optimizer's own states in fp32 (moments, momentum).
OPTIMIZER_BYTES = {"adamw_torch": 8, "adamw_torch_fused": 8, "lamb": 8, "lars": 4, "sgd": 0}


@dataclass(frozen=True)
class StateBytesPerRank:
    """Bytes. optimizer: its own states and, under DeepSpeed, the fp32 master copy of the parameters."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def model_states(kind: str, parameters: int, ranks: int, half: bool, optim: str = "adamw_torch") -> StateBytesPerRank:
    """What one rank holds of a model with `parameters` parameters, sharded over `ranks` ranks.

    kind: single, ddp, zero1, zero2, zero3, fsdp2 (hsdp: fsdp2 with `ranks` = its shard group)
    half: bf16 or fp16. DDP and FSDP2 keep fp32 weights and cast for the computation, so it changes nothing for them.

    Rajbhandari et al. 2020 (arXiv 1910.02054, table 1: 2 + 2 + 12 bytes per parameter), with what DeepSpeed 0.19.8 was
    seen to hold on top of it: a gradient in the weights' precision and a partition of it in fp32 for the step.
    "About 4x" less for ZeRO-1, "about 8x" for ZeRO-2 and "1/N" for ZeRO-3 are the limits of these for many ranks.
    """
    own = OPTIMIZER_BYTES[optim]
    share = parameters / ranks
    if kind in ("single", "ddp"):
        return StateBytesPerRank(4 * parameters, 4 * parameters, own * parameters)
    if kind in ("fsdp2", "hsdp"):
        return StateBytesPerRank(4 * share, 4 * share, own * share)
    weight = 2 if half else 4
    optimizer = (4 + own) * share
    if kind == "zero1":
        return StateBytesPerRank(weight * parameters, weight * parameters, optimizer)
    if kind == "zero2":
        return StateBytesPerRank(weight * parameters, (weight + 4 * half) * share, optimizer)
    return StateBytesPerRank(weight * share, (weight + 4 * half) * share, optimizer)
