"""The cases of expert parallelism: against one process, and from one topology to another.

As in parity.py: 14 steps in fp32 with SGD at a rate that moves the loss by more than 10 %, on tiny mixtures of experts with
random weights, four experts of which a token sees two.
"""

import json
from pathlib import Path
from typing import Any

from . import parity, resume
from .runs import GLOBAL_BATCH

MODELS = ("qwen3_moe", "mixtral", "gpt_oss")
LORA = ["--use_peft", "--learning_rate", "2"]
METHODS = {
    "full": ["--learning_rate", "0.1"],
    "LoRA": [*LORA, "--lora_target_modules", "q_proj,v_proj"],
    "LoRA on experts": [*LORA, "--lora_target_parameters", "experts", "--learning_rate", "1"],
    "QLoRA on experts": [*LORA, "--lora_target_parameters", "experts", "--learning_rate", "1", "--load_in_4bit"],
    "packing": ["--learning_rate", "0.1", "--packing", "true"],
    "checkpointing": ["--learning_rate", "0.1", "--activation_checkpointing", "true"],
}
# (model, method, ranks, ranks of a group or another strategy, accumulation)
PARITY: list[tuple[str, str, int, int | str, int]] = [
    ("qwen3_moe", "full", 2, 2, 2),
    ("mixtral", "full", 4, 2, 1),
    *[("qwen3_moe", "full", 2, 2, accumulation) for accumulation in (1, 4)],
    *[("qwen3_moe", "full", 4, size, accumulation) for size, accumulation in ((2, 1), (2, 4), (4, 2))],
    *[("mixtral", "full", 2, 2, 4), ("mixtral", "full", 4, 4, 1)],
    *[("gpt_oss", "full", 2, 2, 2), ("gpt_oss", "full", 4, 2, 2), ("gpt_oss", "full", 4, 4, 1)],
    *[("qwen3_moe", method, 4, 2, 2) for method in ("LoRA", "LoRA on experts", "packing", "checkpointing")],
    *[("qwen3_moe", "LoRA on experts", 2, strategy, 2) for strategy in ("ddp", "zero2", "zero3", "fsdp2")],
    *[("gpt_oss", "LoRA on experts", 2, "fsdp2", 1), ("mixtral", "LoRA on experts", 2, "ddp", 1)],
    *[("qwen3_moe", "QLoRA on experts", 2, strategy, 2) for strategy in ("fsdp2", 2)],
    *[("gpt_oss", "LoRA on experts", 2, 2, 1), ("mixtral", "LoRA on experts", 4, 4, 2)],
]


def flags_of(strategy: int | str, folder: Path) -> list[str]:
    """FSDP2 with experts over groups of so many ranks, or one of parity.STRATEGIES."""
    if isinstance(strategy, str):
        return parity.STRATEGIES[strategy]
    mesh = {"parallelism_config": {"parallelism_config_ep_size": strategy}}
    file = folder / f"experts{strategy}.yaml"
    file.write_text(json.dumps({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}} | mesh))  # JSON is YAML
    return ["--accelerate_config", str(file)]


def said(strategy: int | str) -> str:
    return strategy if isinstance(strategy, str) else f"experts over {strategy}"


def case(model: str, method: str, ranks: int, strategy: int | str, accumulation: int, folder: Path) -> dict[str, Any]:
    micro = GLOBAL_BATCH // ranks // accumulation
    flags = ["--optim", "sgd", "--per_device_train_batch_size", str(micro), *METHODS[method]]
    flags += flags_of(strategy, folder) if ranks > 1 else []
    return {"name": name_of(model, method, ranks, strategy, accumulation), "model": model, "flags": flags}


def name_of(model: str, method: str, ranks: int, strategy: int | str, accumulation: int) -> str:
    return f"{model}, {method}, {ranks} ranks, {said(strategy)}, accumulation {accumulation}"


def reference_of(model: str, method: str, folder: Path) -> dict[str, Any]:
    return case(model, method, 1, "single", 1, folder)


# (ranks, strategy) of who wrote a checkpoint after step 4, of who continues, the method
RESUMED: dict[str, tuple[Any, Any, str]] = {
    "experts over 2 to themselves": ((2, 2), (2, 2), "full"),
    "experts over 2 to FSDP2": ((2, 2), (2, "fsdp2"), "full"),
    "FSDP2 to experts over 2": ((2, "fsdp2"), (2, 2), "full"),
    "experts over 2 of 4 ranks to 4": ((4, 2), (4, 4), "full"),
    "experts over 4 to 2 ranks": ((4, 4), (2, 2), "full"),
    "experts over 2 to DDP": ((4, 2), (2, "ddp"), "full"),
    "DDP to experts over 2 of 4 ranks": ((2, "ddp"), (4, 2), "full"),
    "ZeRO-3 to experts over 2": ((2, "zero3"), (2, 2), "full"),
    "experts over 2 to ZeRO-2": ((2, 2), (2, "zero2"), "full"),
    "adapters, experts over 2 to themselves": ((2, 2), (2, 2), "LoRA on experts"),
    "adapters, experts over 4 to FSDP2": ((4, 4), (2, "fsdp2"), "LoRA on experts"),
    "adapters, DDP to experts over 2": ((2, "ddp"), (2, 2), "LoRA on experts"),
}


def whole_run(topology: tuple[int, int | str], folder: Path, method: str = "full") -> dict[str, Any]:
    """A run of Qwen3-MoE that nobody disturbs."""
    ranks, strategy = topology
    micro = ["--per_device_train_batch_size", str(GLOBAL_BATCH // ranks // 2)]
    rate = "3e-3" if method == "full" else "1e-2"
    flags = [*resume.SHARED, *METHODS[method], "--learning_rate", rate, *micro, *flags_of(strategy, folder)]
    return {"name": f"{method}, {ranks} ranks, {said(strategy)}", "model": "qwen3_moe", "flags": flags}


def continued(name: str, folder: Path) -> dict[str, Any]:
    *topologies, method = RESUMED[name]
    before, after = (whole_run(topology, folder, method) for topology in topologies)
    checkpoint = folder / "outputs" / before["name"] / f"checkpoint-{resume.SAVED}"
    return after | {"name": name, "flags": [*after["flags"], "--resume_from_checkpoint", str(checkpoint)]}
