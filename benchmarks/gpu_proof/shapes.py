"""Six shapes on one GPU, three models by two methods: tokens per second, MFU, and memory against what `plan` says of them.

The runs are those of benchmarks/gpu.py, whose rows they append to the part's own file.
"""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_models, gpu_plan
from brigade.plan.choice.job_of_run import NotCovered, job_of_run
from brigade.plan.costs.estimate import estimate
from brigade.plan.hardware import gpu
from brigade.train.host.cluster import World
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.recipe.flags import load
from brigade.train.strategy import choose as choose_strategy
from testing.command_line import as_flags

from . import disk
from .subject import Subject, command

# Of benchmarks/gpu_plan.py, the first that fits. A card with 80 GB has room for `base`, but for 8B in full.
OPTIONS = ("base", "least")
KIND = "H100 80GB"  # what a run holds is the same on every kind of card

SHAPES = [(model, method) for model in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b") for method in ("full", "lora")]
FIGURES = (
    "tokens_per_second",
    "mfu",
    "mfu_of_work_done",
    "step_time",
    "peak_memory_gib",
    "reserved_memory_gib",
    "last_loss",
)


def main() -> None:
    subject = Subject(__doc__)
    models = subject.work.parent / "models"
    for model, method in SHAPES[:1] if subject.small else SHAPES:
        measure(subject, models, model, method)
        shutil.rmtree(models / "run", ignore_errors=True)  # of one that was stopped
        if method == SHAPES[-1][1]:  # the last of this model
            shutil.rmtree(models / model, ignore_errors=True)


def measure(subject: Subject, models: Path, model: str, method: str) -> None:
    """Leave the row of a shape. models: where benchmarks/gpu.py writes models and runs"""
    what, results = f"{model} {method}", subject.work / f"{model}-{method}.jsonl"
    option, figures, missing = option_of(model, method, subject.small)
    words = ["-m", "benchmarks.gpu", "--only", model, method, option, "--results", str(results), "--no-page", "--again"]
    words += ["--work", str(models), *(["--tiny", "--steps", "10"] if subject.small else [])]
    again = command(words)
    missing = missing or subject.no_bf16 or subject.no_time
    if not subject.small:
        missing = missing or subject.too_slow(operations(model, method, option))
        missing = missing or disk.lacking(subject.work, disk.of_shape(model, method))
    if missing:
        subject.row(what, figures, command=again, left_out=missing)
        return
    failed, late = subject.run(words, f"{model}-{method}")
    for log in models.rglob("*.log"):  # what train.py wrote: to be sent, while the models go
        log.replace(subject.work / log.name)
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if rows:
        judge(subject, what, rows[-1], again, figures)
    else:
        subject.row(what, figures, failed or ("" if late else "it left no row"), again, left_out=late)


def option_of(model: str, method: str, small: bool) -> tuple[str, dict[str, Any], str]:
    """Return the first option that the card has room for, what the plan expects of it, and why none is run: "" where one fits."""
    card = torch.cuda.get_device_properties(0).total_memory / 2**30
    for option in OPTIONS:
        expected = planned_gib(model, method, option, small)
        figures = {"option": option, "planned_on_the_card_gib": round(expected, 1), "card_gib": round(card, 1)}
        if expected <= card:
            return option, figures, ""
    return option, figures, f"does not fit, by plan: {expected:.0f} GiB, and the card has {card:.0f}"


@functools.cache
def planned_gib(model: str, method: str, option: str, small: bool) -> float:
    """Return the GiB that the plan expects a run to hold, on any card; 0 where no formula covers it."""
    flags = gpu_plan.flags_of(gpu_plan.Job(model, method, option), small)
    settings = load(as_flags(model_name_or_path=str(gpu_models.CONFIGS[model].parent), **flags))
    strategy = choose_strategy(settings, World(0, 0, 1, 1, "", "python"), {})
    batch, config = batch_arithmetic(settings.recipe.training, 1, model), gpu_models.config_of(model, small)
    try:
        return estimate(job_of_run(settings.recipe, strategy, batch, 1, 1, config, KIND), gpu(KIND)).device_gib
    except NotCovered:
        return 0.0


def operations(model: str, method: str, option: str) -> float:
    """Return the floating-point operations that a run takes at least: twice those of a forward pass for the gradients, of
    which adapters need half. Attention's and what is recomputed are left out."""
    flags = gpu_plan.flags_of(gpu_plan.Job(model, method, option), tiny=False)
    tokens = (gpu_plan.WARM_UP + gpu_plan.STEPS) * int(flags["global_batch_size"]) * int(flags["max_length"])
    return tokens * disk.PARAMETERS[model] * (6 if method == "full" else 4)


def judge(subject: Subject, what: str, row: dict[str, Any], again: str, expected: dict[str, Any]) -> None:
    """Leave a row with what was measured, and beside it what the planner's formulas estimate for the same micro-batches."""
    figures = expected | {key: row[key] for key in FIGURES if row.get(key) is not None}
    prediction = row.get("prediction") or {}
    predicted = prediction.get("predicted", {})
    if row["status"] != "ok":
        subject.row(what, figures, f"{row['status']}: {row['reason']}", again)
        return
    shortfall = ""
    if predicted:
        measured = prediction["measured"]["allocated_gib"]
        low, high = predicted["allocated_between"]
        figures |= {"allocated_gib": measured, "planned_gib": predicted["allocated_gib"], "planned_between": [low, high],
                    "planned_step_time": predicted["step_time"]}  # fmt: skip
        if measured is not None and measured > high:  # less than planned does no harm
            shortfall = f"{measured:.2f} GiB allocated, and the plan's 80 % interval ends at {high:.2f}"
    else:
        figures["no_plan"] = prediction.get("none", "the run left no prediction")
    subject.row(what, figures, shortfall, again)


if __name__ == "__main__":
    main()
