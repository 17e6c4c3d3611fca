"""What a trace of a model is asked (traced_model.py), and what it answers. Bytes."""

from dataclasses import dataclass
from typing import Literal

from brigade.plan.costs.job import EAGER, Job, Kernels


@dataclass(frozen=True)
class TraceSettings:
    """What is traced of a model: one sequence of `length` tokens; a micro-batch is as many times as much.

    autocast: bf16 products over fp32 weights and an fp32 residual stream, as DDP computes; else all in bf16, as ZeRO and FSDP2
    checkpointing: every layer is computed again in the backward pass
    attention: "eager", or a flash kernel, of which all keep the same
    kernels: their Triton code is not traced, but what their autograd functions save is
    """

    length: int
    autocast: bool = False
    checkpointing: bool = False
    attention: Literal["eager", "flash2"] = "flash2"
    kernels: Kernels = EAGER


@dataclass(frozen=True)
class Trace:
    """Bytes of a micro-batch.

    kept: by all layers from forward to backward pass, with what they share (embeddings, rotary tables, a mask)
    layers: the same by kind of layer, of one layer, in the order in which the kinds appear
    back: what the backward pass of a layer needs besides; with checkpointing, what computing it again keeps too
    loss: what final norm, logits and loss add at their peak
    """

    kept: float
    layers: tuple[float, ...]
    back: float
    loss: float

    def times(self, rows: int) -> "Trace":
        """Return the bytes of a micro-batch of so many sequences."""
        each = tuple(of_layer * rows for of_layer in self.layers)
        return Trace(self.kept * rows, each, self.back * rows, self.loss * rows)


def settings_of(job: Job) -> TraceSettings | None:
    """Return the trace that stands for a job's memory; None where the job splits or recomputes layers as no trace does."""
    split = job.tensor * job.pipeline * job.context * job.expert > 1
    split = split or job.shape.scores or job.comparison.apart > 1 or job.inputs_on_host
    if split or job.checkpointing not in ("none", "full") or job.every > 1:
        return None
    attention: Literal["eager", "flash2"] = "eager" if job.attention == "eager" else "flash2"
    return TraceSettings(job.sequence, job.autocast, job.checkpointing == "full", attention, job.kernels)
