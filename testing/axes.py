"""The cases of parity for axes besides data parallelism: each against the same single process as the strategies of parity.py."""

from pathlib import Path
from typing import Any

from . import parity
from .runs import GLOBAL_BATCH

TENSOR = {
    "zero1": ["--ds_config", "ds_configs/zero1_tp2.json"],
    "zero2": ["--ds_config", "ds_configs/zero2_tp2.json"],
    "zero3": ["--ds_config", "ds_configs/zero3_tp2.json"],
    "fsdp2": ["--accelerate_config", "FOLDER/fsdp2_tp2.yaml"],
}
FSDP2 = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
MESHES = {"fsdp2_tp2": {"parallelism_config_tp_size": 2}}
# Architectures with norms of each head, tied embeddings, biases.
MODELS = ("qwen2", "qwen3", "gemma3_text", "mistral", "phi")
RATE = {"phi": "0.1"}


def case(
    strategy: str, ranks: int, accumulation: int, folder: Path, model: str | None = None, *more: str
) -> dict[str, Any]:
    """One run of a strategy over so many ranks, as parity.cases has them; `+MODEL` and `+FLAG` are in its name."""
    flags = [flag.replace("FOLDER", str(folder)) for flag in TENSOR[strategy]]
    share = GLOBAL_BATCH // (ranks // 2)
    name = "+".join(
        [f"{strategy}xtp2-w{ranks}-k{accumulation}", *filter(None, [model]), *(flag.strip("-") for flag in more)]
    )
    return {
        "name": name,
        "model": model,
        "flags": [
            *flags,
            *_common(model, share // accumulation),
            "--per_device_eval_batch_size",
            str(1 + ranks),
            *more,
        ],
    }


def reference(model: str | None = None, *more: str) -> dict[str, Any]:
    name = "+".join(["single", *filter(None, [model]), *(flag.strip("-") for flag in more)])
    return {"name": name, "model": model, "flags": [*_common(model, GLOBAL_BATCH), *more]}


def _common(model: str | None, micro: int) -> list[str]:
    rate = RATE.get(model or "", parity.LEARNING_RATE["sgd"] if model is None else "0.1")
    return f"--optim sgd --learning_rate {rate} --per_device_train_batch_size {micro}".split()


def write_meshes(folder: Path) -> None:
    """Accelerate configs that no user needs as a file."""
    import yaml

    for name, mesh in MESHES.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(FSDP2 | {"parallelism_config": mesh}))
