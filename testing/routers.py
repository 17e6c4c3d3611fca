"""Padded sequences for tiny mixtures of experts, and what stands in for their Trainer."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from brigade.train.data.collate import REAL

LENGTHS = (16, 5, 11, 9)


def rows(begin: int = 0, end: int = 4) -> dict[str, torch.Tensor]:
    """Padded sequences with random tokens."""
    lengths = torch.tensor(LENGTHS)[begin:end]
    ids = torch.randint(0, 64, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))[begin:end]
    mask = (torch.arange(max(LENGTHS)) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), REAL: mask.bool()}


def passed(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    return model(**{key: value for key, value in inputs.items() if key != REAL}, use_cache=False)


def trainer_of(model: Any) -> Any:
    """What a RouterLoss and a RouterBias ask of a Trainer."""
    return SimpleNamespace(
        model=model,
        model_wrapped=model,
        args=SimpleNamespace(device=torch.device("cpu")),
        nonfinite=SimpleNamespace(dropped=False),
        accelerator=SimpleNamespace(optimizer_step_was_skipped=False),
        compute_loss_context_manager=nullcontext,
        outputs=lambda model, inputs, _: passed(model, inputs),
    )
