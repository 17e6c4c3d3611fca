"""The cases of parity of rows in parts beside a second axis: tensor groups, stages or experts."""

import json
from pathlib import Path
from typing import Any

from brigade.strategy.axes import Axes
from brigade.strategy.axis_keys import as_mesh, with_axes

from . import axes_experts, axes_sequence
from .axes_sequence import VARIANTS
from .ranks import REPOSITORY
from .runs import GLOBAL_BATCH

TENSOR, PIPELINE, EXPERTS = Axes(tensor=2, sequence=2), Axes(stages=2, sequence=2), Axes(experts=2, sequence=2)
# (axes, kind of strategy, accumulation, variant), on four ranks
CASES = [
    *((TENSOR, kind, 2, "plain") for kind in ("ddp", "zero1", "zero2", "zero3", "fsdp2")),
    *((TENSOR, kind, 1, "packed") for kind in ("zero3", "fsdp2")),
    (TENSOR, "fsdp2", 4, "lora"),
    *((PIPELINE, kind, accumulation, "plain") for kind in ("ddp", "zero1") for accumulation in (2, 4)),
    (PIPELINE, "zero1", 2, "packed"),
    (PIPELINE, "ddp", 4, "lora"),
    (PIPELINE, "zero1", 2, "clipped"),
]


def strategy(axes: Axes, kind: str, **groups: int) -> list[str]:
    """Its flags. groups: further sizes of a parallelism_config"""
    if kind.startswith("zero"):
        config = json.loads((REPOSITORY / f"ds_configs/{kind}.json").read_text())
        return ["--ds_config", json.dumps(with_axes(config, axes))]
    document: dict[str, Any] = {"distributed_type": "MULTI_GPU" if kind == "ddp" else "FSDP"}
    if kind != "ddp":
        document["fsdp_config"] = {"fsdp_version": 2}
    return ["--accelerate_config", json.dumps(document | {"parallelism_config": groups | as_mesh(axes)})]


def case(
    axes: Axes, kind: str, accumulation: int, variant: str = "plain", ranks: int = 4, **more: Any
) -> dict[str, Any]:
    """A run over so many ranks, as axes_sequence.case has them."""
    micro = max(1, (6 if variant == "packed" else GLOBAL_BATCH) // axes.data(ranks) // accumulation)
    usual = f"--optim sgd --learning_rate 0.6 --per_device_train_batch_size {micro} --per_device_eval_batch_size 3"
    flags = [*usual.split(), *strategy(axes, kind), *VARIANTS[variant]]
    name = f"{axes}-{kind}-k{accumulation}-{variant}"
    return {"name": name, "variant": variant, "flags": flags, "model": None, **more}


def of_experts(
    axes: Axes, kind: str, model: str, method: str, ranks: int, accumulation: int, folder: Path
) -> dict[str, Any]:
    """A mixture of experts whose experts go over ranks beside another axis, or under another strategy than FSDP2."""
    groups = {"dp_replicate_size": 2, "dp_shard_size": axes.data(ranks) // 2} if kind == "hsdp" else {}
    known = axes_experts.case(model, method, axes.data(ranks), "fsdp2", accumulation, folder)
    name = f"{axes}-{kind}-w{ranks}-k{accumulation}-{model}-{method}"
    return known | {"name": name, "flags": [*known["flags"], *strategy(axes, kind, **groups)]}


reference = axes_sequence.reference
