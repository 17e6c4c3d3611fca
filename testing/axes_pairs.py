"""The cases of parity of rows in parts beside a second axis: tensor groups, stages or experts."""

import json
from pathlib import Path
from typing import Any

from . import axes_experts, axes_sequence
from .axes_sequence import VARIANTS
from .ranks import REPOSITORY
from .runs import GLOBAL_BATCH

# Of the second axis -> what a ds_config says of it, and an accelerate config.
SECOND: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "tensor": ({"tensor_parallel": {"autotp_size": 2}}, {"tp_size": 2}),
    "pipeline": ({"pipeline": {"stages": 2}}, {"pp_size": 2}),
    "experts": ({}, {"ep_size": 2}),
}
# (second axis, kind of strategy, accumulation, variant)
CASES = [
    *(("tensor", kind, 2, "plain") for kind in ("ddp", "zero1", "zero2", "zero3", "fsdp2")),
    *(("tensor", kind, 1, "packed") for kind in ("zero3", "fsdp2")),
    ("tensor", "fsdp2", 4, "lora"),
    *(("pipeline", kind, accumulation, "plain") for kind in ("ddp", "zero1") for accumulation in (2, 4)),
    ("pipeline", "zero1", 2, "packed"),
    ("pipeline", "ddp", 4, "lora"),
    ("pipeline", "zero1", 2, "clipped"),
]


def strategy(second: str, kind: str) -> list[str]:
    """Its flags, with rows over two ranks."""
    ours, mesh = SECOND[second]
    if kind.startswith("zero"):
        config = json.loads((REPOSITORY / f"ds_configs/{kind}.json").read_text())
        return ["--ds_config", json.dumps(config | {"sequence_parallel_size": 2} | ours)]
    document: dict[str, Any] = {"distributed_type": "MULTI_GPU" if kind == "ddp" else "FSDP"}
    if kind != "ddp":
        document["fsdp_config"] = {"fsdp_version": 2}
    return ["--accelerate_config", json.dumps(document | {"parallelism_config": {"sp_size": 2} | mesh})]


def case(second: str, kind: str, accumulation: int, variant: str = "plain", **more: Any) -> dict[str, Any]:
    """Four ranks compute the same rows together."""
    micro = max(1, (6 if variant == "packed" else GLOBAL_BATCH) // accumulation)
    usual = f"--optim sgd --learning_rate 0.6 --per_device_train_batch_size {micro} --per_device_eval_batch_size 3"
    flags = [*usual.split(), *strategy(second, kind), *VARIANTS[variant]]
    name = f"{second}-{kind}-k{accumulation}-{variant}"
    return {"name": name, "variant": variant, "flags": flags, "model": None, **more}


def reference(variant: str) -> dict[str, Any]:
    return axes_sequence.reference(variant)


def of_experts(ranks: int, method: str, folder: Path) -> dict[str, Any]:
    """Qwen3-MoE: experts and rows over the same two ranks, or on four over two groups of them."""
    known = axes_experts.case("qwen3_moe", method, ranks // 2, "fsdp2", 2, folder)
    at = known["flags"].index("--accelerate_config") if "--accelerate_config" in known["flags"] else None
    flags = known["flags"] if at is None else known["flags"][:at] + known["flags"][at + 2 :]
    return known | {"name": f"experts-w{ranks}-{method}", "flags": [*flags, *strategy("experts", "fsdp2")]}
