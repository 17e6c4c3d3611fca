"""The cases of expert parallelism: against one process, and from one topology to another.

As in parity.py: 14 steps in fp32 with SGD at a rate that moves the loss by more than 10 %, on tiny mixtures of experts with
random weights, four experts of which a token sees two.
"""

import json
from pathlib import Path
from typing import Any

from . import resume
from .runs import GLOBAL_BATCH

MODELS = ("qwen3_moe", "mixtral", "gpt_oss")
LORA = ["--use_peft", "--learning_rate", "2"]
METHODS = {
    "full": ["--learning_rate", "0.1"],
    "LoRA": [*LORA, "--lora_target_modules", "q_proj,v_proj"],
    "LoRA on experts": [*LORA, "--lora_target_parameters", "experts", "--learning_rate", "1"],
    "packing": ["--learning_rate", "0.1", "--packing", "true"],
    "checkpointing": ["--learning_rate", "0.1", "--activation_checkpointing", "true"],
}
# (model, method, ranks, ranks of a group, accumulation)
PARITY = [
    ("qwen3_moe", "full", 2, 2, 2),
    ("mixtral", "full", 4, 2, 1),
    *[("qwen3_moe", "full", 2, 2, accumulation) for accumulation in (1, 4)],
    *[("qwen3_moe", "full", 4, size, accumulation) for size, accumulation in ((2, 1), (2, 4), (4, 2))],
    *[("mixtral", "full", 2, 2, 4), ("mixtral", "full", 4, 4, 1)],
    *[("gpt_oss", "full", 2, 2, 2), ("gpt_oss", "full", 4, 2, 2), ("gpt_oss", "full", 4, 4, 1)],
    *[("qwen3_moe", method, 4, 2, 2) for method in ("LoRA", "LoRA on experts", "packing", "checkpointing")],
    *[("gpt_oss", "LoRA on experts", 2, 2, 1), ("mixtral", "LoRA on experts", 4, 4, 2)],
]


def flags_of(size: int, folder: Path) -> list[str]:
    """The strategy: FSDP2, and from 2 on with experts over groups of `size` ranks; 0: DDP."""
    if not size:
        return ["--ds_config", "none"]
    mesh = {"parallelism_config": {"parallelism_config_ep_size": size}} if size > 1 else {}
    file = folder / f"experts{size}.yaml"
    file.write_text(json.dumps({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}} | mesh))  # JSON is YAML
    return ["--accelerate_config", str(file)]


def case(model: str, method: str, ranks: int, size: int, accumulation: int, folder: Path) -> dict[str, Any]:
    micro = GLOBAL_BATCH // ranks // accumulation
    flags = ["--optim", "sgd", "--per_device_train_batch_size", str(micro), *METHODS[method]]
    strategy = flags_of(size, folder) if ranks > 1 else []
    return {"name": name_of(model, method, ranks, size, accumulation), "model": model, "flags": [*flags, *strategy]}


def name_of(model: str, method: str, ranks: int, size: int, accumulation: int) -> str:
    return f"{model}, {method}, {ranks} ranks, experts over {size}, accumulation {accumulation}"


def reference_of(model: str, method: str, folder: Path) -> dict[str, Any]:
    return case(model, method, 1, 1, 1, folder)


# A run's topology: (ranks, ranks of a group; 1: FSDP2, 0: DDP). What one wrote after step 4 the other continues.
RESUMED = {
    "experts over 2 to themselves": ((2, 2), (2, 2)),
    "experts over 2 to FSDP2": ((2, 2), (2, 1)),
    "FSDP2 to experts over 2": ((2, 1), (2, 2)),
    "experts over 2 of 4 ranks to 4": ((4, 2), (4, 4)),
    "experts over 4 to 2 ranks": ((4, 4), (2, 2)),
    "experts over 2 to DDP": ((4, 2), (2, 0)),
    "DDP to experts over 2 of 4 ranks": ((2, 0), (4, 2)),
}


def whole_run(topology: tuple[int, int], folder: Path, method: str = "full") -> dict[str, Any]:
    """A run of Qwen3-MoE that nobody disturbs."""
    ranks, size = topology
    micro = ["--per_device_train_batch_size", str(GLOBAL_BATCH // ranks // 2)]
    flags = [*resume.SHARED, *METHODS[method], "--learning_rate", "3e-3", *micro, *flags_of(size, folder)]
    return {"name": f"{method}, {ranks} ranks, experts over {size}", "model": "qwen3_moe", "flags": flags}


def continued(name: str, folder: Path) -> dict[str, Any]:
    before, after = (whole_run(topology, folder) for topology in RESUMED[name])
    checkpoint = folder / "outputs" / before["name"] / f"checkpoint-{resume.SAVED}"
    return after | {"name": name, "flags": [*after["flags"], "--resume_from_checkpoint", str(checkpoint)]}
