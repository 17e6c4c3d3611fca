"""Describe somebody else's run as a Job of the planner's, with what train.py does not do."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brigade.errors.tables import table
from brigade.plan.costs import conventions
from brigade.plan.costs.job import Job
from brigade.train.strategy.state_bytes import OPTIMIZER_BYTES


@dataclass(frozen=True)
class Engine(conventions.Engine):
    """An engine of conventions.yaml, beside this file, whose comments explain these fields; or one of train.py's."""

    gathers_hidden: bool = True
    per_tensor: bool = False
    keep_gathered: bool = False
    cut_by_cost: bool = False
    tensor_hidden: float = 0.0
    host_layers: float = 1.0
    listed: bool = False
    holds_inputs: bool = False
    streams: float = 0.0
    dummies: bool = False
    fragmentation: float = 1.1
    family: str = ""


_ROWS = table(Path(__file__).with_name("conventions.yaml"))
ENGINES = {
    name: Engine(**vars(engine), **_ROWS["own"].get(name, {})) for name, engine in conventions.ENGINES.items()
} | {name: Engine(**row) for name, row in _ROWS["engines"].items()}
HALF_GRADIENTS: dict[str, dict[str, Any]] = _ROWS["half_gradients"]
# These three are tables of the planner's that its formulas read by name.
conventions.LOGIT_BYTES.update(_ROWS["logit_bytes"])
conventions.DRIVERS.update(_ROWS["drivers"])
OPTIMIZER_BYTES.update(_ROWS["optimizer_bytes"])


@dataclass(frozen=True)
class PublishedJob(Job):
    """One configuration of any framework.

    Tensor groups, pipelines and expert groups divide as in Megatron and torchtitan: all is divided, stages evenly. Keys and
    values of a context group go round a ring.

    ulysses: a context group exchanges heads instead
    sequence_parallel: tensor groups divide what stands between blocks, too
    dropout: attention drops scores, and what a block adds to the residual stream
    fp8: how dense products in FP8 are scaled, a key of formulas.FP8; "" for bf16
    linear_experts: each expert is three linear layers, which QLoRA holds in four bits (Transformers before 5)
    offload_activations: what checkpointing keeps lies in the host's memory; step_in_backward: no gradient waits for the step
    half_gradients: gradients are in 16 bits where the engine's are usually not
    native: the framework brings modelling code of its own, not Transformers'
    fp32_base: frozen weights are in fp32 under autocast, not in 16 bits
    varying: lengths of samples vary, each batch is padded to its longest, and torch's allocator has its default settings
    whole_gradients: bytes per parameter of the gradients that each rank keeps whole until a step's last micro-batch; 0 where
        each micro-batch's are reduced
    """

    ulysses: bool = False
    sequence_parallel: bool = True
    dropout: bool = False
    fp8: str = ""
    linear_experts: bool = False
    offload_activations: bool = False
    step_in_backward: bool = False
    half_gradients: bool = False
    native: bool = False
    fp32_base: bool = False
    varying: bool = False
    whole_gradients: float = 0.0

    @property
    def autocast(self) -> bool:
        return self.fp32_base or super().autocast

    @property
    def driver(self) -> str:
        return "megatron" if "softmax" in self.kernels else "fused" if self.native else super().driver

    @property
    def conventions(self) -> Engine:
        engine = ENGINES[self.engine]
        return replace(engine, **HALF_GRADIENTS[self.engine]) if self.half_gradients else engine

    @property
    def norm_ranks(self) -> int:
        """How many ranks of a tensor group norms and the residual stream are divided over."""
        return self.tensor if self.sequence_parallel else 1
