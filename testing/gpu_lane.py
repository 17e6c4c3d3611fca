"""The cases of the GPU lane: every engine, axis and method for a few steps on fake GPUs, and without an engine on a CPU."""

from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from brigade.train.strategy.axes import Axes

from . import axes, axes_experts, parity
from .ranks import REPOSITORY
from .runs import GLOBAL_BATCH, run_cases

STEPS = 3  # whose last one's waits are counted: ZeRO-3 has then recorded in which order it needs parameters
LANE = f"--max_steps {STEPS} --eval_steps {STEPS} --attn_implementation varlen".split()
# Of the losses of fp32 on the CPU. Three steps of SGD part by less.
TOLERANCE = {"fp32": parity.TOLERANCE, "bf16": 0.02, "fp16": 0.02}
PRECISIONS: dict[str, tuple[str, ...]] = {"fp32": (), "bf16": ("--bf16",), "fp16": ("--fp16",)}
EXPERTS, VISION = "qwen3_moe", "qwen3_vl"
LORA = ("--use_peft", "--learning_rate", "2")
PACKING = ("--packing", "true", "--learning_rate", "0.3")
IMAGES = ("--freeze_vision_tower", "false", "--learning_rate", "0.1")
PREFERENCES = REPOSITORY / "tests/data/preferences"
DPO = ("--objective", "dpo", "--train_file", str(PREFERENCES / "pairs.jsonl"), "--validation_file", "null")
ROWS = ("--trainable_token_indices", "<|im_start|>,300", "--loraplus_lr_ratio", "4")
EVERY_KIND = ("zero3", "fsdp2", "ddp")
# What needs more of a device, and under which strategies: objectives a second model, a pass over mismatched answers, and another
# head; Muon matrices that are gathered for a step; adapters rows beside a frozen matrix, two rates, and weights out of a file.
BESIDES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "second model": ([*DPO, "--precompute_ref_log_probs", "false"], EVERY_KIND),
    "kto": ([*DPO, "--objective", "kto", "--train_file", str(PREFERENCES / "judged.jsonl")], EVERY_KIND),
    "reward": ([*DPO, "--objective", "reward", "--learning_rate", "0.05"], EVERY_KIND),
    "muon": (["--optim", "muon", "--learning_rate", "1e-3"], ("zero1", "fsdp2")),
    "schedule free": (
        ["--optim", "schedule_free_adamw", "--lr_scheduler_type", "constant", "--learning_rate", "1e-3"],
        ("zero1", "fsdp2"),
    ),
    "adapters": ([*LORA], ("fsdp2",)),
    "rows": ([*LORA, "--learning_rate", "0.3", *ROWS], ("zero3", "fsdp2")),
    "continued": ([*LORA, "--adapter_name_or_path", "outputs/rows"], ("zero3",)),
}  # fmt: skip
# What changes how a strategy computes, and not what: adapters' and states' places, layers' inputs in page-locked memory of the
# host, gradients in fewer bits, the planner's micro-batch, and layers that torch.compile traces. Each is compared with plain
# training.
OTHERWISE: dict[str, tuple[str, list[str]]] = {
    "states on the host": ("fsdp2", ["--accelerate_config", "accelerate_configs/fsdp2_offload_1x4.yaml"]),
    "inputs on the host": ("ddp", ["--activation_checkpointing", "offload"]),
    "inputs on the host, sharded": ("fsdp2", ["--activation_checkpointing", "offload"]),
    "gradients in bf16": ("ddp", ["--ddp_comm_hook", "bf16"]),
    "gradients of low rank": ("ddp", ["--ddp_comm_hook", "power_sgd"]),
    "the planner's micro-batch": ("ddp bf16", ["--per_device_train_batch_size", "auto"]),
    "compiled layers": ("ddp", ["--torch_compile"]),
    "compiled layers, sharded": ("fsdp2", ["--torch_compile"]),
}
ROUGHLY = ("plain, gradients in bf16", "plain, gradients of low rank", "plain, the planner's micro-batch")
METHODS: dict[str, tuple[str, ...]] = {
    "full": (),
    "lora": LORA,
    "dpo": DPO,
    "dpo lora": (*DPO, *LORA),
    "images": IMAGES,
    "packing": PACKING,
    "packing sdpa": (*PACKING, "--attn_implementation", "sdpa"),
}


class Case(NamedTuple):
    """One run: a strategy on so many ranks, what it trains and how it computes."""

    ranks: int
    strategy: list[str]
    precision: str = "fp32"
    method: str = "full"
    model: str | None = None  # of images and texts where the method is "images"
    divided: int = 1  # ranks that together compute one micro-batch
    unit: int = 1  # what another number of ranks has to be a multiple of
    more: tuple[str, ...] = ()


def _axes(ranks: int, kind: str, *more: str, model: str | None = None, **sizes: Any) -> Case:
    divided = Axes(**sizes)
    flags = axes.flags(divided, kind, **axes.two_copies(kind, divided, ranks))
    return Case(ranks, flags, model=model, divided=divided.model, unit=ranks, more=more)


CASES: dict[str, Case] = {
    # NVMe needs libaio and CUDA's headers; the CPU's tests have it (tests/ranks/test_parity.py).
    **{
        name: Case(2, flags)
        for name, flags in parity.STRATEGIES.items()
        if name not in ("hsdp", "zero3_nvme")
    },
    "hsdp": Case(4, parity.STRATEGIES["hsdp"], unit=4),
    "ddp tensor": _axes(2, "ddp", tensor=2),
    "zero1 tensor": _axes(2, "zero1", tensor=2),
    "fsdp2 tensor": _axes(4, "fsdp2", tensor=2),
    "ddp pipeline": _axes(2, "ddp", stages=2),
    "zero1 pipeline": _axes(4, "zero1", stages=2),
    "3D": _axes(4, "zero1", stages=2, tensor=2),
    "zero3 sequence": _axes(2, "zero3", sequence=2),
    "fsdp2 sequence": _axes(2, "fsdp2", sequence=2),
    "fsdp2 experts": _axes(2, "fsdp2", model=EXPERTS, experts=2),
    "ddp lora": Case(2, parity.STRATEGIES["ddp"], method="lora"),
    "zero3 lora": Case(2, parity.STRATEGIES["zero3"], method="lora"),
    "zero3 dpo lora bf16": Case(2, parity.STRATEGIES["zero3"], "bf16", method="dpo lora"),
    "fsdp2 dpo": Case(2, parity.STRATEGIES["fsdp2"], method="dpo"),
    "fsdp2 packing": Case(2, parity.STRATEGIES["fsdp2"], method="packing"),
    "fsdp2 images": Case(2, parity.STRATEGIES["fsdp2"], method="images", model=VISION),
    "zero3 images": Case(2, parity.STRATEGIES["zero3"], method="images", model=VISION),
    "ddp images bf16": Case(2, parity.STRATEGIES["ddp"], "bf16", method="images", model=VISION),
    "ddp bf16": Case(2, parity.STRATEGIES["ddp"], "bf16"),
    "zero3 bf16": Case(2, parity.STRATEGIES["zero3"], "bf16"),
    "fsdp2 bf16": Case(2, parity.STRATEGIES["fsdp2"], "bf16"),
    "ddp experts bf16": Case(2, parity.STRATEGIES["ddp"], "bf16", model=EXPERTS),
    "fsdp2 experts bf16": _axes(2, "fsdp2", model=EXPERTS, experts=2)._replace(precision="bf16"),
    "ddp replicas": Case(2, parity.STRATEGIES["ddp"], more=("--sync_every", "1")),
    "fsdp2 replicas": Case(4, parity.STRATEGIES["hsdp"], unit=4, more=("--sync_every", "1")),
    "zero2 fp16": Case(2, parity.STRATEGIES["zero2"], "fp16"),
    "ddp fp16": Case(2, parity.STRATEGIES["ddp"], "fp16"),
}  # fmt: skip
# Without a strategy, on one GPU.
ONE_PROCESS = {
    "one process": Case(1, [], "bf16", method="packing"),
    "one process sdpa": Case(1, [], "bf16", method="packing sdpa"),
}
EVERY = CASES | ONE_PROCESS
# On any GPU two processes read ahead. Here they do in these cases: each is a fork of a process of 2 GB.
READ_AHEAD = ("fsdp2", "one process", "fsdp2 images")
QUICK = ("ddp bf16", "zero3 bf16", "fsdp2")  # in `make test`
# In `make test-matrix`, for others show the same: ZeRO-1 beside tensor groups and stages, what is offloaded with its parameters,
# adapters under ZeRO-3, and routers in half precision with their loss.
SIBLINGS = ("zero1", "zero3_offload", "ddp lora", "ddp experts bf16", "fsdp2 experts bf16")


def run(
    names: Collection[str], folder: Callable[[], Path], stopped: Collection[str] = (), asking: Collection[str] = ()
) -> dict[str, Any]:
    """Run cases on fake GPUs, each group of them in one group of ranks; returns what testing.runs.run_cases does, by name.

    folder: makes an empty one; stopped, asking: cases to be run as `NAME, stopped`, which dies twice and goes on, and
    `NAME, asking`, which waits for the device in each micro-step
    """
    groups = defaultdict[tuple[int, str], list[dict[str, Any]]](list)
    for name in sorted(names):
        groups[group(name)].append(run_case(name) | {"waits": STEPS})
    for name in sorted(stopped):
        groups[group(name)].append(run_case(name) | {"name": f"{name}, stopped", "stops": (1, 2)})
    for name in sorted(asking):
        groups[group(name)].append(run_case(name) | {"name": f"{name}, asking", "waits": STEPS, "asks": True})
    found = dict[str, Any]()
    for (ranks, _), cases in groups.items():
        found |= run_cases(ranks, cases, folder(), gpus=True)
    return found


def run_case(name: str) -> dict[str, Any]:
    """Return the case as testing.runs.run_cases takes it."""
    flags = [*LANE, *flags_of(name), *(() if name in READ_AHEAD else ("--dataloader_num_workers", "0"))]
    return {"name": name, "flags": flags} | inputs_of(EVERY[name])


def group(name: str) -> tuple[int, str]:
    """Return which cases may share a group of ranks: those of one engine."""
    return EVERY[name].ranks, name if is_alone(name) else name[:4]


def is_alone(name: str) -> bool:
    """Whether a case shares its ranks with no other: DeepSpeed keeps a tensor group for whoever comes next."""
    return name == "3D" or (name.startswith("zero") and "tensor" in name)


def reference_of(name: str) -> str:
    case = EVERY[name]
    return f"one process, {case.method}, {case.model or 'llama'}"


def reference(name: str) -> dict[str, Any]:
    """Return one process without any engine, in fp32."""
    return {"name": reference_of(name), "flags": [*LANE, *reference_flags(name)]} | inputs_of(EVERY[name])


def flags_of(name: str, ranks: int | None = None) -> list[str]:
    """Return the flags of a case without steps and attention. ranks: instead of its own number"""
    case = EVERY[name]
    micro = GLOBAL_BATCH * case.divided // (ranks or case.ranks) // 2
    return [*case.strategy, *PRECISIONS[case.precision], *case.more, *_training(case, max(1, micro))]


def reference_flags(name: str, precision: str = "fp32") -> list[str]:
    """Return those of one process without any engine."""
    return [*PRECISIONS[precision], *_training(EVERY[name], GLOBAL_BATCH)]


def inputs_of(case: Case) -> dict[str, Any]:
    """Return what a case trains, by the keys of testing.runs.run_cases()."""
    return {"images" if case.method == "images" else "model": case.model}


def _training(case: Case, micro: int) -> list[str]:
    rate = axes_experts.METHODS["full"][1] if case.model else "0.6"
    usual = f"--optim sgd --learning_rate {rate} --per_device_train_batch_size {micro} --per_device_eval_batch_size 3"
    return [*usual.split(), *METHODS[case.method]]
