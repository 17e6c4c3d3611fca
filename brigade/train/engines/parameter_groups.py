"""The optimizer's groups of parameters: those that Transformers makes, divided by learning rate and by what steps them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import UserError, did_you_mean
from ..model import parts
from ..model.sizes import elements
from ..recipe.images import PARTS, has_own_rates, learning_rates
from ..recipe.training_section import TrainingSection
from .muon import MATRIX, matrices_of

if TYPE_CHECKING:
    import torch

    from .engine import StepContext

# Place of the part in PARTS, place of the pattern in learning_rates (their number: none matches), whether Muon steps it.
Key = tuple[int, int, bool]


def divides(training: TrainingSection) -> bool:
    """Whether a recipe has groups other than those that Transformers makes."""
    return has_own_rates(training) or bool(training.learning_rates) or training.optim == "muon"


def _key_of(model: torch.nn.Module, training: TrainingSection) -> Callable[[str], Key]:
    """Return what gives a parameter's name the key of its group. Groups are in the order of their keys."""
    patterns = [re.compile(pattern) for pattern in training.learning_rates]
    part_of = parts.part_number(model) if has_own_rates(training) else lambda _: 0
    matrices = {parts.plain_name(name) for name in matrices_of(model)} if training.optim == "muon" else ()

    def key(name: str) -> Key:
        plain = parts.plain_name(name)
        pattern = next((n for n, each in enumerate(patterns) if each.search(plain)), len(patterns))
        return part_of(name), pattern, plain in matrices

    return key


def _rate(key: Key, training: TrainingSection, scaled: float) -> float:
    """The peak learning rate of a group. scaled: learning_rate after learning_rate_scaling, which scales the others as much"""
    part, pattern, _ = key
    if pattern < len(training.learning_rates):
        return [*training.learning_rates.values()][pattern] * scaled / training.learning_rate
    return learning_rates(training, scaled)[PARTS[part]]


def divide(optimizer: torch.optim.Optimizer, model: torch.nn.Module, training: TrainingSection, scaled: float) -> None:
    """Divide an optimizer's groups into groups of one key each, with that key's learning rate, in the order of keys.

    optimizer: one that has made no step; scaled: as of _rate()
    """
    key_of = _key_of(model, training)
    key_of_id = {id(parameter): key_of(name) for name, parameter in model.named_parameters()}
    groups = []
    for key in sorted({*key_of_id.values()}):
        for group in optimizer.param_groups:
            members = [parameter for parameter in group["params"] if key_of_id[id(parameter)] == key]
            if members:
                about = {MATRIX: True} if key[2] else {}
                groups.append({**group, "params": members, "lr": _rate(key, training, scaled), **about})
    optimizer.param_groups[:] = groups


def order(model: torch.nn.Module, names: list[str], training: TrainingSection) -> list[str]:
    """Return names of parameters as divide() orders them; within a key they stay in their order."""
    return sorted(names, key=_key_of(model, training))  # stable


def check(trainer: StepContext) -> None:
    """Raise UserError for a pattern of learning_rates that no trained parameter matches first."""
    settings = trainer.run.settings
    training = settings.recipe.training
    if not training.learning_rates:
        return
    model = trainer.engine.whole_model(trainer)
    key_of = _key_of(model, training)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    matched = {key_of(name)[1] for name in trained}
    for number, pattern in enumerate(training.learning_rates):
        if number not in matched:
            before = any(re.search(pattern, parts.plain_name(name)) for name in trained)
            problem = f"{pattern!r} matches no trained parameter" + (" that none before it matches" if before else "")
            known = sorted({re.sub(r"\.\d+\.", ".0.", parts.plain_name(name)) for name in trained})
            cure = "put it first, or remove it" if before else did_you_mean(pattern, known)
            raise UserError(settings.place("learning_rates"), problem, cure)


def describe(trainer: StepContext) -> dict[str, str]:
    """{"parameter groups": "embed_tokens|lm_head 1,234 parameters at 1e-05; ..."}, or {} where all have the same."""
    training = trainer.run.settings.recipe.training
    if not training.learning_rates and training.optim != "muon":
        return {}
    model, scaled = trainer.engine.whole_model(trainer), trainer.run.batch.learning_rate
    key_of, counts = _key_of(model, training), dict[Key, int]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = key_of(name)
            counts[key] = counts.get(key, 0) + elements(parameter)
    patterns, words = [*training.learning_rates, "others" if training.learning_rates else ""], []
    for key in sorted(counts):
        part = PARTS[key[0]].replace("_", " ") if has_own_rates(training) else ""
        stepped = ("by Muon" if key[2] else "by AdamW") if training.optim == "muon" else ""
        count = f"{counts[key]:,} parameters at {_rate(key, training, scaled):.3g}"
        words.append(" ".join(filter(None, (part, patterns[key[1]], count, stepped))))
    return {"parameter groups": "; ".join(words)}


# In the names of parameters. PEFT's create_loraplus_optimizer counts DoRA's magnitudes to them too (peft/optimizers/loraplus.py).
FASTER = ("lora_B", "lora_embedding_B", "lora_magnitude_vector")


def learns_faster(name: str) -> bool:
    """Whether a parameter is one of those that loraplus_lr_ratio is for."""
    return any(part in FASTER for part in name.split("."))


def divide_lora_plus(optimizer: torch.optim.Optimizer, model: torch.nn.Module, ratio: float) -> None:
    """Divide an optimizer's parameter groups in two for LoRA+ (arXiv 2402.12354), in which the matrices B of adapters have a rate
    of their own: the rest stays as it was, and after it comes what learns faster, at `ratio` times its group's rate. However they
    were divided before, order_lora_plus() gives this order.

    optimizer: one that has made no step
    """
    faster = {id(parameter) for name, parameter in model.named_parameters() if learns_faster(name)}
    slow, fast = list[dict[str, Any]](), list[dict[str, Any]]()
    for group in optimizer.param_groups:
        for is_fast, groups in ((False, slow), (True, fast)):
            members = [parameter for parameter in group["params"] if (id(parameter) in faster) is is_fast]
            if members:
                groups.append({**group, "params": members, "lr": group["lr"] * (ratio if is_fast else 1)})
    optimizer.param_groups[:] = slow + fast


def order_lora_plus(names: list[str]) -> list[str]:
    """Return names of parameters as divide_lora_plus() orders them, of names in the order before it."""
    return sorted(names, key=learns_faster)  # stable
