"""`plan --json`: the same answer for machines. docs/plan-json.md documents each key, and a test compares the two."""

import json
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from ...errors.tables import Fields, table
from ..choice.explain import reason
from ..choice.goals import BILLION, Answer, price
from ..costs.activations import tower_bytes
from ..costs.estimate import Estimate
from ..costs.host_memory import host
from ..costs.memory import GIB

KEYS = table(Path(__file__).with_name("as_json.yaml"))
SCHEMA = 2  # changes where a key is renamed or removed


def answer_json(answer: Answer, advice: Sequence[str], given: float | None) -> str:
    """Return the answer for a model on a cluster: every strategy, the place of the chosen one or null, and the advice."""
    plans = [
        {
            "strategy": candidate.name,
            "reason": reason(candidate, answer.winner),
            "fits": candidate.fits,
            "kernels": candidate.kernels,
        }
        | _numbers(candidate.estimate, given, candidate.fits)
        for candidate in answer.ranked
    ]
    place = answer.ranked.index(answer.winner) if answer.winner else None
    return _whole(plans, place, list(advice))


def recipe_json(
    result: Estimate, strategy: str, verdict: str, fits: bool, advice: Sequence[str], given: float | None
) -> str:
    """Return the answer for a recipe: one plan, and the advice."""
    plan = {"strategy": strategy, "reason": verdict, "fits": fits, "kernels": ""}
    plan |= _numbers(result, given, runs=True)
    return _whole([plan], 0, list(advice))


def _whole(plans: list[Fields], chosen: int | None, advice: list[str]) -> str:
    return json.dumps({"schema": SCHEMA, "chosen": chosen, "advice": advice, "plans": plans}, indent=1)


def _numbers(result: Estimate, given: float | None, runs: bool) -> Fields:
    """Return the figures of a plan. runs: whether it fits, for else it has no time"""
    job, needs = result.job, host(result.job)
    hours = result.hours(BILLION) * job.gpus
    usd, known_from = price(result.gpu.kind, given)
    kept, most = tower_bytes(job)
    figures: Fields = {
        "trained": job.trained or job.shape.parameters - job.frozen_beside,
        "reference": job.comparison.reference or None,
        "reference_hours_per_billion_tokens": result.hours_before(BILLION),
        "images": _read("images", result, {"kept_gib": kept / GIB, "peak_gib": most / GIB}) if job.images else None,
        "sync_every": job.replicas.every if job.replicas.count > 1 else None,
        "recomputes_every": job.every if job.checkpointing == "full" else None,
        "allocated_gib_interval": list(result.memory_interval()),
        "memory_gib": {name: value / GIB for name, value in vars(result.memory).items()},
        "host_gib": max(needs.loading, needs.training) / GIB,
        "checkpoint_gb": needs.checkpoint / 1e9,
        "step_seconds_interval": list(result.time_interval()),
        "seconds": vars(result.time),
        "mfu_percent": result.mfu if job.method == "full" else None,
        "days_per_billion_tokens": result.hours(BILLION) / 24,
        "gpu_hours_per_billion_tokens": hours,
        "usd_per_billion_tokens": usd * hours if known_from else None,
    }
    times = _read("times", result, figures)
    numbers = _read("plan", result, figures) | (times if runs else dict.fromkeys(times))
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in numbers.items()}


def _read(section: str, result: Estimate, figures: Fields) -> Fields:
    """Return the keys of a section of as_json.yaml. figures: those that are no attribute of an estimate"""
    return {name: attrgetter(path)(result) if path else figures[name] for name, path in KEYS[section].items()}
