"""The cases of pipeline parallelism: every schedule against one process without any engine, on the samples of parity.py."""

import json
from pathlib import Path
from typing import Any

from .parity import LEARNING_RATE
from .runs import GLOBAL_BATCH


def config(folder: Path, stages: int, **more: Any) -> list[str]:
    """Flags of DDP between pipelines of so many stages, by an accelerate config in `folder`. more: pp_schedule, ..."""
    mesh = {f"parallelism_config_{key}": value for key, value in {"pp_size": stages, **more}.items()}
    file = folder / f"{'-'.join(map(str, ['pp', stages, *more.values()]))}.yaml"
    file.write_text(json.dumps({"distributed_type": "MULTI_GPU", "parallelism_config": mesh}))
    return ["--accelerate_config", str(file)]


def case(name: str, strategy: list[str], data: int, accumulation: int, *flags: str, **more: Any) -> dict[str, Any]:
    """more: of testing.runs.run_cases, and rate: a key of LEARNING_RATE"""
    micro = GLOBAL_BATCH // data // accumulation
    rate = LEARNING_RATE[more.pop("rate", "sgd")]
    usual = f"--optim sgd --learning_rate {rate} --per_device_train_batch_size {micro} --per_device_eval_batch_size 3"
    return {"name": name, "flags": [*strategy, *usual.split(), *flags], **more}


def zero1(folder: Path, stages: int, **more: Any) -> list[str]:
    """Flags of ZeRO-1 between pipelines of so many stages, by a ds_config in `folder`. more: schedule, virtual_stages"""
    file = folder / f"{'-'.join(map(str, ['zero1', stages, *more.values()]))}.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "pipeline": {"stages": stages, **more}}))
    return ["--ds_config", str(file)]


def deep(folder: Path, layers: int = 4) -> list[str]:
    """Flags of the tiny model with more layers, in `folder`."""
    from .runs import write_inputs

    write_inputs(folder)
    there = folder / f"model-{layers}"
    there.mkdir(exist_ok=True)
    config = json.loads((folder / "model" / "config.json").read_text()) | {"num_hidden_layers": layers}
    (there / "config.json").write_text(json.dumps(config))
    return ["--model_name_or_path", str(there)]
