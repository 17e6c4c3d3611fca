"""The cases of pipeline parallelism: every schedule against one process without any engine, on the samples of parity.py."""

import json
from pathlib import Path
from typing import Any

from .axes import ADAPTERS, VARIANTS, WIDE
from .parity import LEARNING_RATE
from .runs import GLOBAL_BATCH, write_inputs

# A schedule's name -> what a config says of it beside the stages, under short names.
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved1f1b": {"virtual_stages": 2},
    "interleavedzerobubble": {"schedule": "interleavedzerobubble", "virtual_stages": 2},
    "zbv": {"schedule": "zbv", "virtual_stages": 2},
}
LORA = ["--use_peft", "--learning_rate", "3"]
# Packed rows at parity.py's rate part by 1.2e-5 between accumulation 1 and 4 of one process already.
PACKED = ["--packing", "true", "--learning_rate", "0.3"]
# What is compared -> (flags, model of runs.write_model, or "deep": four layers). Each has a reference of its own.
KINDS: dict[str, tuple[list[str], str | None]] = {
    "tied": ([], None),
    "untied": ([], "llama"),
    "gemma3": ([], "gemma3"),
    "packed": (PACKED, None),
    "padded": (["--padding_free", "false"], None),
    "clipped": (["--max_grad_norm", "0.5"], None),
    "lora": (LORA, None),
    **{name: (VARIANTS[name], WIDE if name != "dora" else None) for name in ADAPTERS},
    "deep": ([], "deep"),
}


def ddp(folder: Path, stages: int, tensor: int = 1, **more: Any) -> list[str]:
    """Flags of DDP between pipelines of so many stages, by an accelerate config in `folder`. more: of SCHEDULES"""
    sizes = {"pp_size": stages, "tp_size": tensor, **{f"pp_{key}": value for key, value in more.items()}}
    mesh = {f"parallelism_config_{key}": value for key, value in sizes.items()}
    document = {"distributed_type": "MULTI_GPU", "parallelism_config": mesh}
    return ["--accelerate_config", _written(folder / f"{_named('ddp', stages, tensor, more)}.yaml", document)]


def zero1(folder: Path, stages: int, tensor: int = 1, **more: Any) -> list[str]:
    """Likewise of ZeRO-1, by a ds_config."""
    document: dict[str, Any] = {"zero_optimization": {"stage": 1}, "pipeline": {"stages": stages, **more}}
    document["tensor_parallel"] = {"autotp_size": tensor}
    return ["--ds_config", _written(folder / f"{_named('zero1', stages, tensor, more)}.json", document)]


def _named(kind: str, stages: int, tensor: int, more: dict[str, Any]) -> str:
    return "-".join(map(str, [kind, stages, tensor, *more.values()]))


def _written(file: Path, document: dict[str, Any]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document))
    return str(file)


def case(name: str, kind: str, strategy: list[str], data: int, accumulation: int, folder: Path, **more: Any) -> Any:
    """A case of testing.runs.run_cases. data: the data-parallel size; more: as there"""
    flags, model = KINDS[kind]
    rate = LEARNING_RATE.get(model or "", LEARNING_RATE["sgd"])
    micro = GLOBAL_BATCH // data // accumulation
    usual = f"--optim sgd --learning_rate {rate} --per_device_train_batch_size {micro} --per_device_eval_batch_size 7"
    if model == "deep":
        flags, model = [*flags, *deep(folder)], None
    return {"name": name, "flags": [*strategy, *usual.split(), *flags], "model": model, **more}


def reference(kind: str, folder: Path) -> Any:
    return case(kind, kind, [], 1, 1, folder, ranks=1)


def deep(folder: Path, layers: int = 4) -> list[str]:
    """Flags of the tiny model with more layers, in `folder`."""
    write_inputs(folder)
    config = json.loads((folder / "model" / "config.json").read_text()) | {"num_hidden_layers": layers}
    return ["--model_name_or_path", str(Path(_written(folder / f"model-{layers}" / "config.json", config)).parent)]
