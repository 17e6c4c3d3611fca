"""The cases of docs/evidence/parity.md beyond data parallelism: every axis with every strategy that has it, at 2 to 8 ranks."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from brigade.train.strategy.axes import Axes
from testing import axes, axes_experts, axes_pairs, axes_pipeline, axes_sequence
from testing.parity import ACCUMULATIONS
from testing.runs import GLOBAL_BATCH

RANKS = (2, 4, 8)
NAMES = {
    "ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2", "hsdp": "HSDP",
    "offloaded": "ZeRO-3, offloaded",
}  # fmt: skip
# Of each axis: how ranks are divided, strategies, what is compared. `plain` and `lora` have every accumulation, all else has 2.
# What an axis does not run with is in train/strategy/refused.yaml. Beside experts, all ranks have data of their own.
Plan = dict[str, list[tuple[str, str, str]]]
PLAN: Plan = {
    "tensor": [
        ("tensor 2", "zero1 zero2 zero3 fsdp2 ddp", "plain packing clip"),
        ("tensor 2", "zero3 fsdp2", "qwen2 qwen3 gemma3_text phi"),
        ("tensor 2", "ddp fsdp2", "lora dora qlora qdora"),
        ("tensor 2", "zero1 zero2 zero3", "lora"),
        ("tensor 2 x data 2", "ddp zero1 zero2 zero3 offloaded fsdp2", "plain"),
        ("tensor 2 x data 2", "zero1 fsdp2", "packing gemma3_text"),
        ("tensor 2 x data 2", "fsdp2", "lora dora qlora qdora"),
        ("tensor 2 x data 2", "zero1 zero2 zero3", "lora"),
        ("tensor 2 x data 4", "ddp zero1 zero2 zero3 fsdp2 hsdp", "plain"),
        ("tensor 2 x data 4", "fsdp2", "packing lora"),
    ],
    "sequence": [
        ("sequence 2", "ddp zero1 zero2 zero3 fsdp2", "plain packed"),
        ("sequence 2", "zero3 fsdp2", "clipped tiled mistral gemma3"),
        ("sequence 2", "ddp zero3 fsdp2", "lora"),
        ("sequence 2 x data 2", "ddp zero1 zero2 zero3 fsdp2 hsdp", "plain"),
        ("sequence 2 x data 2", "zero3 fsdp2", "packed lora"),
        ("sequence 4", "ddp zero1 zero2 zero3 fsdp2", "plain"),
        ("sequence 4", "zero3 fsdp2", "packed"),
        ("sequence 2 x data 4", "ddp zero1 zero2 zero3 fsdp2 hsdp", "plain"),
    ],
    "pipeline": [
        (
            "pipeline 2",
            "ddp zero1",
            "plain packed lora dora qlora qdora gpipe interleaved1f1b interleavedzerobubble zbv",
        ),
        ("pipeline 2", "ddp", "untied clipped gemma3"),
        ("pipeline 2 x data 2", "ddp zero1", "plain packed lora"),
        ("pipeline 2 x data 2", "zero1", "dora qlora qdora"),
        ("pipeline 2 x data 2", "zero1", "untied clipped gemma3 gpipe interleaved1f1b interleavedzerobubble zbv"),
        ("pipeline 4", "ddp zero1", "plain"),
        ("pipeline 2 x tensor 2", "ddp zero1", "plain packed lora zbv"),
        ("pipeline 2 x tensor 2", "zero1", "dora qlora qdora"),
        ("pipeline 2 x data 4", "ddp zero1", "plain"),
        ("pipeline 2 x data 4", "zero1", "packed lora"),
        ("pipeline 4 x data 2", "ddp zero1", "plain"),
        ("pipeline 2 x tensor 2 x data 2", "ddp zero1", "plain"),
        ("pipeline 2 x tensor 2 x data 2", "zero1", "packed lora"),
    ],
    "experts": [
        ("experts 2", "fsdp2", "full packing checkpointing mixtral gpt_oss lora lora-experts qlora-experts"),
        ("experts 2 x data 2", "fsdp2", "full packing mixtral gpt_oss lora lora-experts"),
        ("experts 2 x data 2", "hsdp ddp", "full packing lora-experts"),
        ("experts 2 x data 2", "hsdp", "mixtral gpt_oss"),
        ("experts 4", "fsdp2", "full mixtral gpt_oss lora-experts"),
        ("experts 4", "hsdp ddp", "full"),
        ("experts 2 x data 4", "fsdp2", "full packing lora lora-experts"),
        ("experts 4 x data 2", "fsdp2", "full gpt_oss lora-experts"),
        ("experts 4 x data 2", "hsdp", "full"),
    ],
    "pairs": [
        ("tensor 2 x sequence 2", "ddp zero1 zero2 zero3 fsdp2", "plain"),
        ("tensor 2 x sequence 2", "zero3 fsdp2", "packed"),
        ("tensor 2 x sequence 2", "zero3 fsdp2", "lora"),
        ("pipeline 2 x sequence 2", "ddp zero1", "plain packed lora"),
        ("experts 2 x sequence 2", "fsdp2", "full packing"),
        ("experts 2 x tensor 2", "fsdp2", "full packing mixtral lora lora-experts"),
        ("experts 2 x tensor 2", "ddp", "full"),
        ("experts 2 x pipeline 2", "ddp zero1", "full lora-experts"),
        ("experts 2 x pipeline 2", "zero1", "packing mixtral gpt_oss"),
        ("tensor 2 x sequence 2 x data 2", "zero1 fsdp2", "plain"),
        ("pipeline 2 x sequence 2 x data 2", "zero1", "plain"),
        ("pipeline 2 x tensor 2 x sequence 2", "zero1", "plain"),
        ("experts 2 x sequence 2 x data 2", "fsdp2", "full"),
        ("experts 2 x tensor 2 x data 2", "hsdp", "full"),
        ("experts 2 x pipeline 2 x tensor 2", "zero1", "full"),
    ],
}
EVERY_ACCUMULATION = ("plain", "full", "lora")
DAMAGED = "a gradient 1 % too large"
METHODS = {
    "lora": "LoRA",
    "dora": "DoRA",
    "qlora": "QLoRA",
    "qdora": "QDoRA",
    "lora-experts": "LoRA on experts",
    "qlora-experts": "QLoRA on experts",
}
# Models and other things that a case is about, in the page's words.
WORDS = {
    "packing": "packing", "packed": "packing", "clip": "clipping", "clipped": "clipping", "untied": "untied head",
    "tiled": "tiled loss and MLP", "checkpointing": "activation checkpointing", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "gemma3_text": "Gemma 3", "gemma3": "Gemma 3", "mistral": "Mistral", "phi": "Phi", "mixtral": "Mixtral",
    "gpt_oss": "gpt-oss", **{schedule: schedule for schedule in axes_pipeline.SCHEDULES},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run over `ranks` ranks, and the run of one process that it is compared with (testing.runs.run_cases).

    covers: what the run is about, in the page's words
    """

    axis: str
    ranks: int
    divided: str
    strategy: str
    method: str
    covers: str
    run: dict[str, Any]
    reference: dict[str, Any]


def cases(axis: str, ranks: int, folder: Path) -> list[Case]:
    """Those of one axis on so many ranks; on two, the last has a rank whose gradient is 1 % too large. folder: for strategies"""
    found = [
        case for row in PLAN[axis] if math.prod(sizes_of(row[0]).values()) == ranks for case in _row(axis, *row, folder)
    ]
    if ranks == RANKS[0] and found:
        first = found[0]
        run = {**first.run, "name": "damaged", "damage": True}
        found.append(Case(axis, ranks, first.divided, first.strategy, first.method, DAMAGED, run, first.reference))
    return found


def sizes_of(divided: str) -> dict[str, int]:
    """ "tensor 2 x data 4" -> {"tensor": 2, "data": 4}"""
    return {name: int(size) for name, size in (part.split() for part in divided.split(" x "))}


def axes_of(sizes: dict[str, int]) -> Axes:
    """{"pipeline": 2, "data": 4} -> Axes(stages=2)"""
    named: dict[str, Any] = {
        {"pipeline": "stages"}.get(name, name): size for name, size in sizes.items() if name != "data"
    }
    return Axes(**named)


def order(plan: Plan, row: dict[str, Any]) -> tuple[int, int, int]:
    """Where a row of results stands: the axis, the number of ranks, the division in the plan's order."""
    divisions = [divided for divided, *_ in plan[row["axis"]]]
    return list(plan).index(row["axis"]), int(row["ranks"]), divisions.index(row["divided"])


def _row(axis: str, divided: str, kinds: str, variants: str, folder: Path) -> Iterator[Case]:
    """Yield the cases of one row of PLAN."""
    sizes = sizes_of(divided)
    ranks = math.prod(sizes.values())
    batches = axes_of(sizes).data(ranks)
    for kind in kinds.split():
        for variant in variants.split():
            for accumulation in ACCUMULATIONS if variant in EVERY_ACCUMULATION else (2,):
                if batches * accumulation > GLOBAL_BATCH:
                    continue
                run, reference = RUNS[axis](kind, sizes, ranks, accumulation, variant, folder)
                run["name"] = f"{divided}-{kind}-{variant}-{accumulation}"
                covers = WORDS.get(variant, f"accumulation {accumulation}")
                yield Case(axis, ranks, divided, NAMES[kind], METHODS.get(variant, "full"), covers, run, reference)


# ---- a run, and the one that it is compared with -----------------------------------------------------------------
Runs = tuple[dict[str, Any], dict[str, Any]]


def _tensor(kind: str, sizes: dict[str, int], ranks: int, accumulation: int, variant: str, folder: Path) -> Runs:
    base = {"offloaded": "zero3", "hsdp": "fsdp2"}.get(kind, kind)
    variant = "" if variant == "plain" else variant
    run = axes.case(f"{base}_tp2", ranks, accumulation, variant)
    mesh = {"dp_replicate_size": 2, "dp_shard_size": ranks // 4, "tp_size": 2}
    hsdp = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": mesh}
    to_host = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    offloaded = {"zero_optimization": {"stage": 3, **to_host}, "tensor_parallel": {"autotp_size": 2}}
    others = {"hsdp": ["--accelerate_config", json.dumps(hsdp)], "offloaded": ["--ds_config", json.dumps(offloaded)]}
    return {**run, "flags": [*run["flags"], *others.get(kind, [])]}, axes.reference(variant)


def _sequence(kind: str, sizes: dict[str, int], ranks: int, accumulation: int, variant: str, folder: Path) -> Runs:
    model = variant if variant in ("mistral", "gemma3") else None
    variant = "plain" if model else variant
    of = partial(axes_sequence.case, kind, sizes["sequence"], ranks, accumulation)
    return of(variant, model), axes_sequence.reference(variant, model)


def _pipeline(kind: str, sizes: dict[str, int], ranks: int, accumulation: int, variant: str, folder: Path) -> Runs:
    """Four stages, and several on one rank, need a model of four layers."""
    schedule = axes_pipeline.SCHEDULES.get(variant, {})
    strategy = {"ddp": axes_pipeline.ddp, "zero1": axes_pipeline.zero1}[kind]
    flags = strategy(folder, sizes["pipeline"], sizes.get("tensor", 1), **schedule)
    deep = sizes["pipeline"] > 2 or schedule
    what = "deep" if deep else "tied" if variant == "plain" else variant
    run = axes_pipeline.case("", what, flags, sizes.get("data", 1), accumulation, folder)
    return run, axes_pipeline.reference(what, folder)


def _experts(kind: str, sizes: dict[str, int], ranks: int, accumulation: int, variant: str, folder: Path) -> Runs:
    model = variant if variant in axes_experts.MODELS else "qwen3_moe"
    method = METHODS.get(variant, "full" if variant in axes_experts.MODELS else variant)
    run = axes_experts.case(model, method, ranks, (axes_of(sizes), kind), accumulation)
    return run, axes_experts.reference_of(model, method)


def _pairs(kind: str, sizes: dict[str, int], ranks: int, accumulation: int, variant: str, folder: Path) -> Runs:
    if "experts" in sizes:
        return _experts(kind, sizes, ranks, accumulation, variant, folder)
    return axes_pairs.case(axes_of(sizes), kind, accumulation, variant, ranks), axes_pairs.reference(variant)


RUNS = {"tensor": _tensor, "sequence": _sequence, "pipeline": _pipeline, "experts": _experts, "pairs": _pairs}
