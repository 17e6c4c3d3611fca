"""Compare a path with eager attention in fp32: logits and gradients have to be the same except for rounding.

The reference runs each sample by itself through eager attention in fp32, which knows nothing of packing. How far off a path may
be is measured in differences that rounding makes: those of eager in the same precision, each sample by itself, and each row as
if it were one sample.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..train.data.store import IGNORED
from . import models
from .paths import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What FlashAttention's own tests allow (tests/test_flash_attn.py: twice the error of eager in the same dtype for outputs, three
# times for gradients). `bias` is how far a whole gradient is too long or too short: rounding goes up as often as down, so a
# factor in it shows long before any single element does.
FACTORS = {"logits": 2.0, "gradients": 3.0, "bias": 3.0}
# Below this many unit roundoffs a difference counts as rounding, however exact eager is: sums of some hundred products in another
# order. In fp32 eager is the reference itself. docs/evidence/kernels.md has the measurements.
FLOORS = {"fp32": {"logits": 256.0, "gradients": 512.0, "bias": 64.0}}
HALF = {"logits": 0.0, "gradients": 0.0, "bias": 2.0}
ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp64": 2.0**-53}
FAR = 1e9  # stands for NaN, inf and missing gradients: JSON has no inf
SCALE = 1024.0  # the loss scale in fp16, without which the smallest gradients would be 0


def dtype_of(name: str) -> torch.dtype:
    """The torch.dtype that a path's table calls fp32, bf16, fp16 or fp64."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}[name]


class Proof:
    """Comparisons of one model on one device in one dtype. config: as from models.for_proof(); dtype: fp32, bf16 or fp16"""

    def __init__(self, config: Row, dtype: str, device: torch.device | str) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.samples = models.pairs(models.samples(config["vocab_size"]))
        # Half precision in both forms that a run has: weights in it (LoRA's base), and fp32 weights under autocast.
        self.forms = (dtype,) if dtype == "fp32" else (dtype, "autocast")
        self.reference = self.alone("fp32", self.samples)
        # The longer a row, the more is rounded: on a CPU torch sums a norm's gradient over it in half precision.
        rows = models.whole_rows(self.samples)
        whole = self.alone("fp32", rows)
        self.rounding = {
            form: larger(errors(self.alone(form, self.samples), self.reference), errors(self.alone(form, rows), whole))
            for form in self.forms
        }

    def model(self, form: str, how: str = "eager") -> "PreTrainedModel":
        weights = "fp32" if form == "autocast" else form
        return models.build(self.config, how, dtype_of(weights), self.device)

    def autocast(self, form: str) -> torch.autocast:
        half = dtype_of(self.dtype) if form == "autocast" else None
        return torch.autocast(torch.device(self.device).type, half, enabled=half is not None)

    def alone(self, form: str, samples: list[Row]) -> tuple[list[torch.Tensor], Row]:
        """(logits of each sample, gradients) of eager attention on single samples, without position ids, masks or lengths."""
        model = self.model(form)
        return alone(model, samples, self.device, self.autocast(form), self.scale(form))

    def scale(self, form: str) -> float:
        return SCALE if self.dtype == "fp16" and form != "fp32" else 1.0

    def compare(
        self, change: Callable[["PreTrainedModel"], "PreTrainedModel"], told: models.Told, backward: bool = True
    ) -> list[Row]:
        """{"errors", "allowed", "form"} of a path in each of its forms. change: called with the model, returns it as the path
        wants it"""
        rows = []
        for form in self.forms:
            model = change(self.model(form, told.how))
            off, allowed = errors(self.packed(model, form, told, backward), self.reference), self.allowed(form)
            off["moved"], allowed["moved"] = self.moved(model, form, told), self.moved_allowed(allowed)
            if "bias" in off:  # that of the kind of matrix that is furthest off
                kind = max(off["bias"], key=lambda kind: off["bias"][kind] / allowed["bias"][kind])
                off["bias"], allowed["bias"] = off["bias"][kind], allowed["bias"][kind]
            rows.append({"errors": off, "allowed": {key: allowed[key] for key in off}, "form": form})
        return rows

    def allowed(self, form: str) -> Row:
        """The differences that rounding may make, in the form of errors()."""
        floors = {key: count * ROUNDOFF[self.dtype] for key, count in FLOORS.get(self.dtype, HALF).items()}
        limits = {key: max(FACTORS[key] * self.rounding[form][key], floors[key]) for key in ("logits", "gradients")}
        biases = self.rounding[form]["bias"]
        return limits | {"bias": {kind: max(FACTORS["bias"] * off, floors["bias"]) for kind, off in biases.items()}}

    def moved_allowed(self, allowed: Row) -> float:
        """How far one sample may move another: not at all, except that an expert's tokens are multiplied together."""
        return allowed["logits"] if models.has_experts(self.config) else 0.0

    def packed(
        self, model: "PreTrainedModel", form: str, told: models.Told, backward: bool
    ) -> tuple[list[torch.Tensor], Row]:
        inputs = models.batch(self.samples, models.PACKED, told, self.device)
        with self.autocast(form):
            logits = self._logits(model, inputs, told)
            if not backward:
                return logits, {}
            loss = models.forward(model, inputs, told, labels=True).loss
        (loss * self.scale(form)).backward()
        return logits, gradients(model, self.scale(form))

    def moved(self, model: "PreTrainedModel", form: str, told: models.Told) -> float:
        """How far other samples' logits move when one sample in the middle or at the beginning of a row gets another answer."""
        replaced = (0, 5)
        changed = [dict(sample) for sample in self.samples]
        for number in replaced:
            ids, answers = changed[number]["input_ids"], (changed[number]["labels"] != IGNORED).cumsum() > 0
            changed[number]["input_ids"] = np.where(answers, (ids - 3 + 7) % (self.config["vocab_size"] - 3) + 3, ids)
        logits = []
        with self.autocast(form):
            for samples in (self.samples, changed):
                logits.append(self._logits(model, models.batch(samples, models.PACKED, told, self.device), told))
        others = (i for i in range(len(self.samples)) if i not in replaced)
        return max(difference(logits[1][i], logits[0][i]) for i in others)

    def _logits(self, model: "PreTrainedModel", inputs: Row, told: models.Told) -> list[torch.Tensor]:
        with torch.no_grad():
            logits = models.forward(model, inputs, told, labels=False).logits
        return models.of_samples(logits[0].detach().float(), told.shares)


def alone(
    model: "PreTrainedModel",
    samples: list[Row],
    device: torch.device | str,
    context: AbstractContextManager[None],
    scale: float = 1.0,
) -> tuple[list[torch.Tensor], Row]:
    """(logits of each sample, gradients of the mean loss over supervised tokens), with the samples one by one."""
    supervised = sum(int((sample["labels"] != IGNORED).sum()) for sample in samples)
    logits = []
    for sample in samples:
        ids, labels = (torch.tensor(sample[key], dtype=torch.long, device=device) for key in ("input_ids", "labels"))
        with context:
            own = model(input_ids=ids[None], use_cache=False).logits[0]
        own = own if own.dtype == torch.float64 else own.float()
        loss = torch.nn.functional.cross_entropy(own[:-1], labels[1:], reduction="sum") / supervised
        (loss * scale).backward()
        logits.append(own.detach())
    return logits, gradients(model, scale)


def gradients(model: "PreTrainedModel", scale: float) -> Row:
    """{parameter: gradient} in fp32 or wider; an expert that no token chose has none."""
    raw = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {
        name.replace("_orig_mod.", ""): (value.float() if value.element_size() < 8 else value) / scale
        for name, value in raw.items()
    }


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference relative to the largest element, for small elements are sums of large ones. NaN and inf: FAR."""
    off = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))
    return off if off < FAR else FAR


def errors(ours: tuple[list[torch.Tensor], Row], theirs: tuple[list[torch.Tensor], Row]) -> Row:
    """{"logits", "gradients", "bias"}: the largest relative difference of any sample's logits, of any parameter's gradient, and
    {kind of matrix: how far from 1 the share of their gradient in ours is}. Without gradients only the first."""
    off: Row = {"logits": max(map(difference, ours[0], theirs[0]))}
    if not ours[1]:
        return off
    kinds = dict.fromkeys(_shares(theirs[1], theirs[1]), FAR)
    if ours[1].keys() != theirs[1].keys():
        return off | {"gradients": FAR, "bias": kinds}
    off["gradients"] = max(difference(ours[1][name], gradient) for name, gradient in theirs[1].items())
    if off["gradients"] < FAR:
        kinds = {kind: abs(share - 1) for kind, share in _shares(ours[1], theirs[1]).items()}
    return off | {"bias": kinds}


def larger(one: Row, other: Row) -> Row:
    """The larger of each of two errors()."""
    bias = {kind: max(off, other["bias"][kind]) for kind, off in one["bias"].items()}
    return {key: max(one[key], other[key]) for key in ("logits", "gradients")} | {"bias": bias}


def _shares(ours: Row, theirs: Row) -> dict[str, float]:
    """<ours, theirs> / <theirs, theirs> for each kind of matrix over all layers: with more elements less rounding remains."""
    sums: dict[str, list[float]] = {}
    for name, gradient in theirs.items():
        if gradient.dim() > 1:
            own, other = ours[name].double().flatten(), gradient.double().flatten()
            kind = sums.setdefault(re.sub(r"\d+", "*", name), [0.0, 0.0])
            kind[0] += float(own @ other)
            kind[1] += float(other @ other)
    return {kind: product / whole for kind, (product, whole) in sums.items() if whole}


def worst(rows: list[Row]) -> Row:
    """The row with the largest error for what is allowed, with "why": "" where it agrees."""
    found = max(rows, key=excess)
    return found | {"why": in_words(found)}


def excess(row: Row) -> float:
    """The largest error as a multiple of what is allowed; infinite where none is allowed."""
    parts = ((row["errors"][key], row["allowed"][key]) for key in row["errors"])
    return max(0.0 if not off else off / allowed if allowed else float("inf") for off, allowed in parts)


def in_words(row: Row) -> str:
    """The errors beyond what is allowed, as in `gradients are off by 3.1e-01, rounding allows 8.0e-03`; "" if there is none."""
    wrong = [
        f"{key} {'are' if key in ('logits', 'gradients') else 'is'} off by {off:.1e}, rounding allows {row['allowed'][key]:.1e}"
        for key, off in row["errors"].items()
        if key != "moved" and not off <= row["allowed"][key]
    ]
    moved = row["errors"].get("moved", 0.0)
    if not moved <= row["allowed"].get("moved", 0.0):
        wrong.append(f"a sample moves another by {moved:.1e}")
    return "; ".join(wrong)
