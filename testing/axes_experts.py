"""The cases of expert parallelism: against one process, and from one topology to another.

As in parity.py: fp32, SGD at a rate that moves the loss, on tiny mixtures of experts with
random weights, four experts of which a token sees two.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from brigade.train.strategy.axes import Axes

from . import axes, parity, resume
from .runs import GLOBAL_BATCH

MODELS = ("qwen3_moe", "mixtral", "gpt_oss")
LORA = ["--use_peft", "--learning_rate", "2"]
ROUTERS = ["--learning_rate", "0.1", "--router_aux_loss_coef", "0.5"]
BIASES = ["--learning_rate", "0.1", "--router_bias_update_rate", "0.1"]
METHODS = {
    "full": ["--learning_rate", "0.1"],
    "LoRA": [*LORA, "--lora_target_modules", "q_proj,v_proj"],
    "LoRA on experts": [*LORA, "--lora_target_parameters", "experts", "--learning_rate", "1"],
    "QLoRA on experts": [*LORA, "--lora_target_parameters", "experts", "--learning_rate", "1", "--load_in_4bit"],
    "packing": ["--learning_rate", "0.1", "--packing", "true"],
    "checkpointing": ["--learning_rate", "0.1", "--activation_checkpointing", "true"],
    "router loss": ROUTERS,
    "router loss, packing, checkpointing": [*ROUTERS, "--packing", "true", "--activation_checkpointing", "true"],
    "router bias": BIASES,
    "router bias, packing, checkpointing": [*BIASES, "--packing", "true", "--activation_checkpointing", "true"],
    # With 0.5, two runs of one process differ by 3e-4 after eight steps.
    "router loss, LoRA on experts": [
        *[*LORA, "--lora_target_parameters", "experts", "--learning_rate", "1"],
        *["--router_aux_loss_coef", "0.05"],
    ],
}
# FSDP2 with experts over so many ranks, other axes and a kind of strategy, or a strategy without expert parallelism.
Strategy = int | tuple[Axes, str] | str
OVER_2, OVER_4 = Axes(experts=2), Axes(experts=4)
TENSOR, TENSOR_4 = Axes(tensor=2, experts=2), Axes(tensor=2, experts=4)
SEQUENCE = Axes(sequence=2, experts=2)
STAGES, STAGES_TENSOR = Axes(stages=2, experts=2), Axes(stages=2, tensor=2, experts=2)
VIRTUAL = [("zero1", "interleaved1f1b"), ("ddp", "interleavedzerobubble"), ("zero1", "zbv")]
# (model, method, ranks, strategy, accumulation)
PARITY: list[tuple[str, str, int, Strategy, int]] = [
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
    *[("qwen3_moe", "full", 4, (OVER_2, "hsdp"), accumulation) for accumulation in (1, 2, 4)],
    *[("mixtral", "full", 4, (OVER_4, "hsdp"), 1), ("gpt_oss", "full", 4, (OVER_2, "hsdp"), 2)],
    *[("qwen3_moe", "full", ranks, (OVER_2, "ddp"), accumulation) for ranks, accumulation in ((2, 2), (4, 1), (4, 2))],
    *[
        ("qwen3_moe", method, 4, (OVER_2, kind), 2)
        for method in ("packing", "LoRA on experts", "QLoRA on experts")
        for kind in ("hsdp", "ddp")
    ],
    *[("qwen3_moe", "full", 2, (TENSOR, "fsdp2"), accumulation) for accumulation in (1, 2, 4)],
    *[("qwen3_moe", "full", 4, (TENSOR, kind), accumulation) for kind in ("ddp", "fsdp2") for accumulation in (2, 4)],
    *[("mixtral", "full", 4, (each, "fsdp2"), 1) for each in (TENSOR, TENSOR_4)],
    *[
        ("qwen3_moe", method, 4, (TENSOR, "fsdp2"), 2)
        for method in ("LoRA", "LoRA on experts", "packing", "checkpointing")
    ],
    *[("qwen3_moe", "LoRA on experts", 2, (TENSOR, "ddp"), 1)],
    *[("qwen3_moe-wide", "QLoRA on experts", 4, (TENSOR, "fsdp2"), 2)],
    *[("qwen3_moe", "full", ranks, (SEQUENCE, "fsdp2"), 2) for ranks in (2, 4)],
    *[("qwen3_moe", "packing", 4, (SEQUENCE, "fsdp2"), 2), ("qwen3_moe", "full", 4, (SEQUENCE, "ddp"), 2)],
    *[("qwen3_moe", "full", 4, (Axes(tensor=2, sequence=2, experts=4), "fsdp2"), 2)],
    *[("qwen3_moe", "full", 4, (STAGES, kind), accumulation) for kind in ("ddp", "zero1") for accumulation in (2, 4)],
    *[(model, "full", 4, (STAGES, kind), 1) for model, kind in (("mixtral", "zero1"), ("gpt_oss", "ddp"))],
    *[("qwen3_moe", method, 4, (STAGES, "zero1"), 2) for method in ("LoRA on experts", "packing", "checkpointing")],
    *[("qwen3_moe", method, 4, (STAGES, "ddp"), 4) for method in ("LoRA", "LoRA on experts")],
    *[("qwen3_moe", "full", 4, (STAGES_TENSOR, kind), 2) for kind in ("ddp", "zero1")],
    *[("qwen3_moe", "full", 4, (replace(STAGES, sequence=2), "zero1"), 2)],
    *[("qwen3_moe", "full", 4, (replace(STAGES, schedule="gpipe"), "zero1"), 4)],
    *[("qwen3_moe", "router loss", 2, kind, 2) for kind in ("ddp", "zero2", "zero3", "fsdp2", 2)],
    *[("qwen3_moe", "router loss", 2, (each, "fsdp2"), 2) for each in (SEQUENCE, TENSOR)],
    *[("qwen3_moe", "router loss", 4, strategy, 1) for strategy in ("ddp", 4)],
    *[("qwen3_moe", "router loss, packing, checkpointing", 2, kind, 2) for kind in ("ddp", "zero3", "fsdp2", 2)],
    *[("qwen3_moe", "router loss, LoRA on experts", 2, kind, 2) for kind in ("ddp", "zero3", 2)],
    *[(model, "router loss", 2, "zero3", 2) for model in ("mixtral", "gpt_oss")],
    *[("minimax_m2", "router bias", 2, kind, 2) for kind in ("ddp", "zero2", "zero3", "fsdp2", 2)],
    *[("minimax_m2", "router bias", 2, (each, "fsdp2"), 2) for each in (SEQUENCE, TENSOR)],
    *[("minimax_m2", "router bias", 4, strategy, 1) for strategy in ("ddp", "hsdp", 4)],
    *[("minimax_m2", "router bias, packing, checkpointing", 2, kind, 2) for kind in ("ddp", "zero3", "fsdp2", 2)],
    *[("deepseek_v3-spread", "router bias", 2, kind, 2) for kind in ("zero3", "fsdp2", 2)],
    *[(model, "router bias", 2, kind, 2) for model in ("ernie4_5_moe", "laguna") for kind in ("ddp", "zero2", "fsdp2")],
    *[("qwen3_moe-4", "full", 4, (replace(STAGES, virtual=2, schedule=name), kind), 4) for kind, name in VIRTUAL],
]


def flags_of(strategy: Strategy, ranks: int) -> list[str]:
    if isinstance(strategy, str):
        return parity.STRATEGIES[strategy]
    over, kind = _divided(strategy)
    return axes.flags(over, kind, **axes.two_copies(kind, over, ranks))


def said(strategy: Strategy) -> str:
    if isinstance(strategy, str):
        return strategy
    over, kind = _divided(strategy)
    return " x ".join(filter(None, [kind, str(over), over.schedule]))


def batches(strategy: Strategy, ranks: int) -> int:
    """How many micro-batches are computed at once."""
    return ranks if isinstance(strategy, str) else _divided(strategy)[0].data(ranks)


def _divided(strategy: int | tuple[Axes, str]) -> tuple[Axes, str]:
    return (Axes(experts=strategy), "fsdp2") if isinstance(strategy, int) else strategy


def case(model: str, method: str, ranks: int, strategy: Strategy, accumulation: int) -> dict[str, Any]:
    micro = GLOBAL_BATCH // batches(strategy, ranks) // accumulation
    flags = ["--optim", "sgd", "--per_device_train_batch_size", str(micro), *METHODS[method]]
    flags += flags_of(strategy, ranks) if ranks > 1 else []
    name = name_of(model, method, ranks, strategy, accumulation)
    return {"name": name, "ranks": ranks, "model": model, "flags": flags}


def name_of(model: str, method: str, ranks: int, strategy: Strategy, accumulation: int) -> str:
    return f"{model}, {method}, {ranks} ranks, {said(strategy)}, accumulation {accumulation}"


def reference_of(model: str, method: str) -> dict[str, Any]:
    return case(model, method, 1, "single", 1)


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
    "HSDP to itself": ((4, (OVER_2, "hsdp")), (4, (OVER_2, "hsdp")), "full"),
    "DDP with experts over 2 to itself": ((4, (OVER_2, "ddp")), (4, (OVER_2, "ddp")), "full"),
    "tensor groups to themselves": ((4, (TENSOR, "fsdp2")), (4, (TENSOR, "fsdp2")), "full"),
    "tensor groups with adapters to themselves": ((4, (TENSOR, "fsdp2")), (4, (TENSOR, "fsdp2")), "LoRA on experts"),
    "HSDP to DDP on 2 ranks": ((4, (OVER_2, "hsdp")), (2, "ddp"), "full"),
    "ZeRO-2 to HSDP": ((2, "zero2"), (4, (OVER_2, "hsdp")), "full"),
    "tensor groups to FSDP2": ((4, (TENSOR, "fsdp2")), (2, "fsdp2"), "full"),
    "experts over 2 to tensor groups": ((2, 2), (4, (TENSOR_4, "fsdp2")), "full"),
    "DDP on stages to itself": ((4, (STAGES, "ddp")), (4, (STAGES, "ddp")), "full"),
    "ZeRO-1 on stages to itself": ((4, (STAGES, "zero1")), (4, (STAGES, "zero1")), "full"),
    "ZeRO-1 on stages with adapters to itself": ((4, (STAGES, "zero1")), (4, (STAGES, "zero1")), "LoRA on experts"),
    "ZeRO-1 on stages to FSDP2": ((4, (STAGES, "zero1")), (2, "fsdp2"), "full"),
    "experts over 2 to DDP on stages": ((2, 2), (4, (STAGES, "ddp")), "full"),
    "ZeRO-3 to ZeRO-1 on stages with tensor groups": ((2, "zero3"), (4, (STAGES_TENSOR, "zero1")), "full"),
    "stages with tensor groups to experts over 4": ((4, (STAGES_TENSOR, "zero1")), (4, 4), "full"),
    "DDP to itself": ((2, "ddp"), (2, "ddp"), "full"),
    "routers' biases, DDP to itself": ((2, "ddp"), (2, "ddp"), "router bias"),
    "routers' biases, ZeRO-2 to itself": ((2, "zero2"), (2, "zero2"), "router bias"),
    "routers' biases, ZeRO-3 to itself": ((2, "zero3"), (2, "zero3"), "router bias"),
    "routers' biases, FSDP2 to itself": ((2, "fsdp2"), (2, "fsdp2"), "router bias"),
    "routers' biases, experts over 2 to themselves": ((2, 2), (2, 2), "router bias"),
    "routers' biases, DDP to FSDP2": ((2, "ddp"), (2, "fsdp2"), "router bias"),
    "routers' biases, FSDP2 to ZeRO-3": ((2, "fsdp2"), (2, "zero3"), "router bias"),
    "routers' biases, ZeRO-2 to experts over 2": ((2, "zero2"), (2, 2), "router bias"),
    "DDP with experts over 2 to ZeRO-3": ((4, (OVER_2, "ddp")), (2, "zero3"), "full"),
}


def whole_run(topology: tuple[int, Strategy], method: str = "full") -> dict[str, Any]:
    """A run that nobody disturbs, of Qwen3-MoE or, where routers' biases are updated, of MiniMax-M2."""
    ranks, strategy = topology
    micro = ["--per_device_train_batch_size", str(GLOBAL_BATCH // batches(strategy, ranks) // 2)]
    rate, model = "3e-3" if method == "full" else "1e-2", "minimax_m2" if method == "router bias" else "qwen3_moe"
    flags = [*resume.SHARED, *METHODS[method], "--learning_rate", rate, *micro, *flags_of(strategy, ranks)]
    return {"name": f"{method}, {ranks} ranks, {said(strategy)}", "ranks": ranks, "model": model, "flags": flags}


def continued(name: str, folder: Path) -> dict[str, Any]:
    *topologies, method = RESUMED[name]
    before, after = (whole_run(topology, method) for topology in topologies)
    checkpoint = folder / "outputs" / before["name"] / f"checkpoint-{resume.SAVED}"
    return after | {"name": name, "flags": [*after["flags"], "--resume_from_checkpoint", str(checkpoint)]}


def biases_of(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return name -> a router's bias in the model that this case has left; adapters have none."""
    file = folder / "outputs" / case["name"] / "model.safetensors"
    found = load_file(file) if file.is_file() else {}
    return {name: tensor for name, tensor in found.items() if name.endswith(("correction_bias", "expert_bias"))}
