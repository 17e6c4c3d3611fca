"""Runs of preferences or of images that die and go on, or that another strategy continues: what both kinds of cases share.

A case is one of preferences.py or of image_runs.py. An epoch has three steps.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .command_line import as_flags
from .preferences import run_groups

SAVED = 2
STOPS = (SAVED, 3)  # in the middle of an epoch, and at the beginning of the next
SHARED = as_flags(optim="adamw_torch", learning_rate="3e-3", weight_decay="0.1", max_grad_norm=1, lr_scheduler_type="cosine",
                  save_steps=SAVED, save_total_limit=9)  # fmt: skip
RATE = ["--learning_rate", "1e-2"]  # of adapters
DROPOUT = ["--lora_dropout", "0.2"]  # whose random numbers belong to a rank


def whole(case: Any, folder: Path, *further: str, dropout: bool = False, **more: Any) -> dict[str, Any]:
    """Return an undisturbed run of a case. dropout: whether its adapters have any"""
    adapted = [*RATE, *(DROPOUT if dropout else [])] if "LoRA" in case.variant else []
    return case.run(folder, *SHARED, *adapted, *further, **more)


def exact(
    cases: dict[str, Any], folder: Path, further: dict[str, list[str]] | None = None
) -> dict[tuple[str, str], Any]:
    """Return what an undisturbed and a stopped run of each case logged: (name, "whole" or "stopped") -> its log. further: name ->
    more flags of a case"""
    todo = {}
    for name, case in cases.items():
        for which, more in (("whole", {}), ("stopped", {"stops": STOPS})):
            flags = (further or {}).get(name, [])
            todo[name, which] = whole(case, folder, *flags, dropout=True, name=f"{name}, {which}", **more)
    return run_groups(folder, todo)


def assert_same_files(name: str, folder: Path) -> None:
    """Raise AssertionError where a stopped run has saved another model or other adapters than the undisturbed one."""
    one, other = (
        sorted((folder / "outputs" / f"{name}, {which}").glob("*model*.safetensors")) for which in ("whole", "stopped")
    )
    assert one and [file.name for file in one] == [file.name for file in other]
    assert all(mine.read_bytes() == theirs.read_bytes() for mine, theirs in zip(one, other, strict=True))


def resharded(pairs: Iterable[tuple[Any, Any]], folder: Path, kept: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """Return what undisturbed runs logged, by case, and what runs logged that went on from their checkpoints, by pair.

    kept: strategies that are given what the first side has computed of the reference; the others have an empty cache
    """
    first, second = {}, {}
    for before, after in pairs:
        first[before] = whole(before, folder)
        checkpoint = folder / "outputs" / first[before]["name"] / f"checkpoint-{SAVED}"
        resumed = ["--resume_from_checkpoint", str(checkpoint)]
        second[before, after] = whole(after, folder, *resumed, name=f"{before} to {after}")
        if after.strategy in kept:
            second[before, after]["cache"] = first[before]["cache"]
    return run_groups(folder, first), run_groups(folder, second)
