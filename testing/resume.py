"""The cases of resuming: every strategy continues what every strategy wrote, on as many ranks or on others.

Each is a run of 8 steps, or of the 14 of docs/evidence/resume.md, four of them before the checkpoint that it continues from:
in fp32, with AdamW, weight decay, a cosine schedule and clipped gradients. The checkpoint lies in the middle of an epoch.
"""

from pathlib import Path
from typing import Any, NamedTuple

from brigade.train.strategy.axes import Axes

from . import axes
from .parity import DDP, STRATEGIES
from .runs import GLOBAL_BATCH, STEPS, run_each

SAVED = 4  # an epoch has five steps
TOLERANCE = 1e-5  # relative, over the further steps
SHARED = [
    *["--optim", "adamw_torch", "--learning_rate", "3e-3", "--weight_decay", "0.1", "--max_grad_norm", "1"],
    *["--lr_scheduler_type", "cosine", "--save_steps", str(SAVED), "--save_total_limit", "9"],
]
_FREE = ["--optim", "schedule_free_adamw", "--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", "3"]
_ADAPTERS = ["--use_peft", "--learning_rate", "1e-2"]
METHODS: dict[str, list[str]] = {
    "full": [],
    "LoRA": _ADAPTERS,
    "LoRA+": [*_ADAPTERS, "--loraplus_lr_ratio", "4", "--trainable_token_indices", "5,300"],
    "QLoRA": [*_ADAPTERS, "--load_in_4bit"],
    "LAMB": ["--optim", "lamb", "--learning_rate", "2e-2"],
    "schedule-free": _FREE,
    "Muon": ["--optim", "muon", "--learning_rates", '{"embed_tokens|lm_head": 1e-3}'],
}
# Several axes at once -> sizes, kind of strategy; the rest of the ranks are data-parallel.
SEVERAL = {
    "zero1_pp2": (Axes(stages=2), "zero1"),
    "zero1_tp2_pp2": (Axes(tensor=2, stages=2), "zero1"),
    "zero1_sp2_pp2": (Axes(sequence=2, stages=2), "zero1"),
    "fsdp2_tp2_sp2": (Axes(tensor=2, sequence=2), "fsdp2"),
}
EVERY = STRATEGIES | axes.STRATEGIES | {name: axes.flags(*of_it) for name, of_it in SEVERAL.items()}


class Side(NamedTuple):
    """One side of a resume: a strategy on so many ranks."""

    strategy: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.strategy} on {self.ranks}"


class Resume(NamedTuple):
    method: str
    before: Side
    after: Side

    @property
    def name(self) -> str:
        return f"{self.method}, {self.before} to {self.after}"


def run_of(method: str, side: Side) -> dict[str, Any]:
    """The case of an undisturbed run, for testing.runs."""
    size = SEVERAL[side.strategy][0].model if side.strategy in SEVERAL else 2 if side.strategy in axes.STRATEGIES else 1
    micro = max(1, min(4, -(-GLOBAL_BATCH // (side.ranks // size))))
    flags = [*SHARED, *METHODS[method], *EVERY[side.strategy], "--per_device_train_batch_size", str(micro)]
    return {"name": f"{method}, {side}", "flags": flags}


def group(side: Side) -> tuple[int, str]:
    """Which runs may share a group of processes: DeepSpeed keeps a tensor group for whoever comes next."""
    alone = side.strategy in axes.STRATEGIES and side.strategy.startswith("zero")
    return side.ranks, side.strategy if alone else ""


def checkpoint_of(method: str, side: Side, folder: Path) -> Path:
    """The one that an undisturbed run in `folder` left after SAVED steps."""
    return folder / "outputs" / run_of(method, side)["name"] / f"checkpoint-{SAVED}"


def continued(resume: Resume, folder: Path) -> dict[str, Any]:
    """The case of a run that goes on from what an undisturbed one in `folder` left."""
    whole = run_of(resume.method, resume.after)
    checkpoint = checkpoint_of(resume.method, resume.before, folder)
    return {"name": resume.name, "flags": [*whole["flags"], "--resume_from_checkpoint", str(checkpoint)]}


def in_groups(cases: list[tuple[Side, dict[str, Any]]], folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """What runs logged, by name: each case on its side's ranks."""
    return run_each(
        (case | dict(zip(("ranks", "group"), group(side), strict=True)) for side, case in cases), folder, steps=steps
    )


def _across(*rows: str) -> list[Resume]:
    """ "LoRA: zero1_tp2 4 -> fsdp2 2" """
    found = []
    for row in rows:
        method, before, after = row.replace(" -> ", ": ").split(": ")
        sides = (Side(strategy, int(ranks)) for strategy, ranks in (side.split() for side in (before, after)))
        found.append(Resume(method, *sides))
    return found


# Divisions into others, and what is not divided: docs/evidence/resume.md.
DIVIDED = _across(
    "full: zero1_tp2_pp2 8 -> zero1_pp2 4",
    "full: zero1_tp2_pp2 8 -> fsdp2 4",
    "full: zero1_tp2_pp2 8 -> zero1_tp2_pp2 4",
    "full: zero1_tp2_pp2 8 -> ddp 1",
    "full: fsdp2 2 -> zero1_tp2_pp2 8",
    "full: zero1_sp2_pp2 8 -> zero1_sp2_pp2 4",
    "full: zero1_sp2_pp2 4 -> zero1_pp2 2",
    "full: zero1_sp2_pp2 4 -> zero3 2",
    "full: zero2 2 -> zero1_sp2_pp2 4",
    "full: ddp_tp2 4 -> ddp_tp2 2",
    "full: ddp_tp2 4 -> ddp 2",
    "full: ddp_tp2 2 -> zero1_tp2_pp2 4",
    "full: zero3 2 -> ddp_tp2 4",
    "full: fsdp2_tp2_sp2 4 -> fsdp2 2",
    "full: zero1_tp2 4 -> ddp 2",
    "LoRA: zero1_tp2 4 -> fsdp2 2",
    "LoRA: ddp 2 -> fsdp2_tp2 4",
    "LoRA: fsdp2_tp2 2 -> zero1_tp2_pp2 4",
)


def worst(result: dict[str, Any], reference: dict[str, Any]) -> float:
    """The largest relative difference of the further steps' losses and of the held-out losses. Raises ValueError where the two
    have not as many."""
    counts = [[len(log[figure]) for figure in ("loss", "eval_loss")] for log in (result, reference)]
    if counts[0] != counts[1] or counts[0][0] <= SAVED:
        raise ValueError(f"{counts[0]} losses and held-out losses, where {counts[1]} were expected")
    pairs = [*zip(result["loss"][SAVED:], reference["loss"][SAVED:], strict=True)]
    pairs += zip(result["eval_loss"], reference["eval_loss"], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def assert_same(whole: dict[str, Any], stopped: dict[str, Any]) -> None:
    """Raise AssertionError where a run that died and went on logged anything else than the undisturbed one, in any bit."""
    for figure in ("loss", "grad_norm", "eval_loss"):
        assert stopped[figure] == whole[figure] and len(whole[figure]) > 2, figure


# ---- exact: the same strategy on the same ranks -------------------------------------------------------------------------------
# Each dies right after an evaluation in the middle of an epoch, and again in the next epoch, and goes on twice; LoRA has dropout,
# whose random numbers belong to a rank.
STOPS = (4, 6)
_LORA = ["--use_peft", "--learning_rate", "3e-2", "--lora_dropout", "0.2"]
_RATES = ["--learning_rates", '{"embed_tokens|lm_head": 1e-3}']
_BEST = ["--load_best_model_at_end", "--early_stopping_patience", "2", "--eval_steps", "2", "--save_steps", "2"]
EXACT: dict[str, list[str]] = {
    **STRATEGIES,
    **{f"{name}+lora": [*STRATEGIES[name], *_LORA] for name in ("ddp", "zero2", "zero3", "fsdp2")},
    **{f"{name}+qlora": [*STRATEGIES[name], *_LORA, "--load_in_4bit"] for name in ("ddp", "zero3", "fsdp2")},
    **{f"{name}+packing": [*STRATEGIES[name], "--packing", "true"] for name in ("zero2", "fsdp2")},
    **{f"{name}+best": [*STRATEGIES[name], *_BEST, "--learning_rate", "3e-2"] for name in ("ddp", "zero2", "zero3", "fsdp2")},
    **{f"ddp+{hook}": [*DDP, "--ddp_comm_hook", hook] for hook in ("bf16", "power_sgd")},
    "ddp+lamb": [*DDP, "--optim", "lamb"],
    **{f"{name}+muon": [*STRATEGIES[name], "--optim", "muon", *_RATES] for name in ("ddp", "zero1", "zero3", "fsdp2")},
    **{f"{name}+free": [*STRATEGIES[name], *_FREE] for name in ("ddp", "zero1", "zero2_offload", "zero3", "fsdp2")},
    "fsdp2+free+lora": [*STRATEGIES["fsdp2"], *_FREE, *_LORA],
    "zero1+free+bf16": [*STRATEGIES["zero1"], *_FREE, "--bf16"],
    **{f"{name}+free+best": [*STRATEGIES[name], *_FREE, *_BEST] for name in ("ddp", "zero3", "fsdp2")},
    **axes.STRATEGIES,
    **{f"{name}+lora": [*axes.STRATEGIES[name], *_LORA] for name in ("zero1_tp2", "zero3_tp2", "fsdp2_tp2")},
    "fsdp2_tp2+qdora": [*axes.STRATEGIES["fsdp2_tp2"], *_LORA, "--load_in_4bit", "--use_dora"],
    "fsdp2_tp2+best": [*axes.STRATEGIES["fsdp2_tp2"], *_BEST, "--learning_rate", "3e-2"],
    "zero2+8bit": [*STRATEGIES["zero2"], "--optim", "adamw_8bit"],
    "ddp+routers": [*DDP, *_LORA, "--router_aux_loss_coef", "0.5"],
}  # fmt: skip
MODELS = {"fsdp2_tp2+qdora": axes.WIDE, "ddp+routers": "qwen3_moe"}


def exact(name: str) -> list[dict[str, Any]]:
    """Two cases: undisturbed, and with STOPS."""
    micro = "8" if "_tp2" in name else "4"  # two ranks of a tensor group share their data
    flags = [*SHARED, *EXACT[name], "--per_device_train_batch_size", micro]
    # DeepSpeed keeps a tensor group for whoever comes next in its process, so these have processes of their own.
    about = {"ranks": 4 if name == "hsdp" else 2, "group": "divided" if "_tp2" in name else ""}
    whole = about | {"name": name, "flags": flags, "model": MODELS.get(name)}
    return [whole, whole | {"name": f"{name}, stopped", "stops": STOPS}]
