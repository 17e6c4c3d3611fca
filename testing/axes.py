"""The cases of parity for axes besides data parallelism: each against the same single process as the strategies of parity.py."""

import json
from typing import Any

from brigade.train.strategy.axes import Axes
from brigade.train.strategy.axis_keys import as_mesh, with_axes

from .command_line import as_flags
from .parity import LEARNING_RATE
from .ranks import REPOSITORY
from .runs import GLOBAL_BATCH

DDP_MESH = {"parallelism_config_tp_size": 2}
STRATEGIES = {
    **{f"{zero}_tp2": ["--ds_config", f"ds_configs/{zero}_tp2.json"] for zero in ("zero1", "zero2", "zero3")},
    "fsdp2_tp2": ["--accelerate_config", "accelerate_configs/fsdp2_tp2_1x4.yaml"],
    "ddp_tp2": ["--accelerate_config", json.dumps({"distributed_type": "MULTI_GPU", "parallelism_config": DDP_MESH})],
}
# Architectures with a norm of each head, with tied embeddings, with biases.
MODELS = ("qwen2", "qwen3", "gemma3_text", "mistral", "phi")
# With parameters that no plan names on a rank's own heads or neurons, with saved buffers; and with inputs that are split.
OUTSIDE_THE_PLAN = ("apertus", "phi-norms")
SPLIT_INPUTS = ("phi3", "glm4", "olmo3")
LINEAR_ATTENTION = ("qwen3_5_text",)  # whose layers read the weights of a convolution by themselves
ADAPTERS = {"dora": ["--use_dora"], "qlora": ["--load_in_4bit"], "qdora": ["--load_in_4bit", "--use_dora"]}
WIDE = "llama-wide"  # so that a tensor group divides no block of 4-bit weights
# "llama" has a head of its own.
OF_VARIANT = {"qlora": WIDE, "qdora": WIDE, "ends": "llama", "tiled": "llama", "lora-norms": "qwen3"}
TILED = as_flags(tiled_loss=24, tiled_mlp=24, learning_rate=0.1)  # the head divided, or whole because it is tied
VARIANTS = {
    # At parity.py's rate one process at accumulation 4 is 1.2e-5 from itself at 1.
    "packing": ["--packing", "true", "--learning_rate", "0.3"],
    "lora": ["--use_peft", "--learning_rate", "10"],
    "lora-norms": ["--use_peft", "--learning_rate", "0.5"],  # whose frozen norms of heads get no gradient to sum
    **{name: ["--use_peft", "--learning_rate", "1", *of_it] for name, of_it in ADAPTERS.items()},
    "ends": ["--use_peft", "--lora_target_modules", "q_proj,v_proj", "--lora_modules_to_save", "embed_tokens,lm_head"],
    "adamw": ["--optim", "adamw_torch_fused", "--learning_rate", "1e-3"],
    "checkpointing": ["--activation_checkpointing", "true"],
    "clip": ["--max_grad_norm", "1"],
    "tiled": TILED,
    "tiled-tied": TILED,
}


def flags(axes: Axes, kind: str, **groups: int) -> list[str]:
    """Return the flags of a strategy with these axes. groups: further sizes of a parallelism_config"""
    if kind.startswith("zero"):
        config = json.loads((REPOSITORY / f"ds_configs/{kind}.json").read_text())
        return ["--ds_config", json.dumps(with_axes(config, axes))]
    document: dict[str, Any] = {"distributed_type": "MULTI_GPU" if kind == "ddp" else "FSDP"}
    if kind != "ddp":
        document["fsdp_config"] = {"fsdp_version": 2}
    return ["--accelerate_config", json.dumps(document | {"parallelism_config": groups | as_mesh(axes)})]


def two_copies(kind: str, axes: Axes, ranks: int) -> dict[str, int]:
    """What HSDP says of its groups besides."""
    return {"dp_replicate_size": 2, "dp_shard_size": axes.data(ranks) // 2} if kind == "hsdp" else {}


def case(strategy: str, ranks: int, accumulation: int, variant: str = "") -> dict[str, Any]:
    """One run over so many ranks, as parity.cases has them. variant: a model or one of VARIANTS"""
    micro = GLOBAL_BATCH // (ranks // 2) // accumulation
    name = f"{strategy}-w{ranks}-k{accumulation}{variant and '+'}{variant}"
    of_it = [*STRATEGIES[strategy], "--per_device_eval_batch_size", str(4 + ranks)]
    return _case(name, of_it, micro, variant) | {"ranks": ranks}


def reference(variant: str = "") -> dict[str, Any]:
    """One process without any engine."""
    return _case(f"single+{variant}", [], GLOBAL_BATCH, variant) | {"ranks": 1}


def _case(name: str, of_it: list[str], micro: int, variant: str) -> dict[str, Any]:
    known = MODELS + OUTSIDE_THE_PLAN + SPLIT_INPUTS + LINEAR_ATTENTION
    model = variant if variant in known else OF_VARIANT.get(variant)
    rate = {None: LEARNING_RATE["sgd"], "apertus": "0.1"}.get(model, "0.3")
    shared = f"--optim sgd --learning_rate {rate} --per_device_train_batch_size {micro}".split()
    return {"name": name, "model": model, "flags": [*of_it, *shared, *VARIANTS.get(variant, [])]}
