"""The first two lines of an answer: whether it fits and what it takes, and the command to go on with; and all of it for machines.

docs/plan-json.md documents each key of `plan --json`, and a test compares the two.
"""

import argparse
import json
import math
import shlex
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path

from ...errors.tables import Document, Fields, table
from ..choice.explain import reason
from ..choice.goals import BILLION, Answer, price, tokens_in_words
from ..costs.activations import tower_bytes
from ..costs.estimate import Estimate
from ..costs.host_memory import host
from ..costs.memory import GIB

NOT_TYPED = ("json", "write")  # flags that the command to go on with leaves out


def known(value: float, low: float, high: float) -> tuple[str, str, str]:
    """Return three figures with as many digits as their interval deserves: its width has two, or more where the first is near
    an end that it is not."""
    width = high - low or value / 10
    place = math.floor(math.log10(width)) - 1 if width > 0 else 0

    def shown(figure: float) -> str:
        return f"{round(figure, -place):,.{max(0, -place)}f}"

    while any(shown(end) == shown(value) and abs(end - value) > 0.05 * value for end in (low, high)):
        place -= 1
    return shown(value), shown(low), shown(high)


def factors_of_time(result: Estimate) -> tuple[float, float]:
    """Return how many times the expected time the ends of its interval are: (the fast one, the slow one)."""
    fast, slow = (seconds / result.time.total for seconds in result.time_interval())
    return fast, slow


def speed_of(result: Estimate, gpus: int = 1) -> tuple[str, str, str]:
    """Return tokens per second on so many GPUs: what is expected, and the slow and the fast end."""
    fast, slow = factors_of_time(result)
    speed = result.tokens_per_second_per_gpu * gpus
    return known(speed, speed / slow, speed / fast)


def needed(result: Estimate) -> str:
    """Return the memory that a configuration needs: `49 of 79 GiB of each GPU (up to 68)`."""
    digits = 0 if result.gpu.memory_gib >= 40 else 1
    device, whole, most = (f"{gib:,.{digits}f}" for gib in (result.device_gib, result.gpu.memory_gib, result.most_gib))
    return f"{device} of {whole} GiB of each GPU (up to {most})"


def speed_and_price(result: Estimate, asked: float | None = None, usd: float | None = None) -> str:
    """Return how fast a configuration is.

    asked: tokens of which the hours and the money were asked for; usd: for an hour of a GPU, None for a published price
    """
    job = result.job
    speed, slowest, fastest = speed_of(result, job.gpus)
    line = f"{speed} tokens/s{' in all' * (job.gpus > 1)} ({slowest} to {fastest})"
    if asked is None:
        return line
    fast, slow = factors_of_time(result)
    hours = result.hours(asked)
    spent = known(hours, hours * fast, hours * slow)
    line += "; {} tokens in {} hours ({} to {})".format(tokens_in_words(asked), *spent)
    each, source = price(result.gpu.kind, usd)
    if not source:
        return line
    money = hours * job.gpus * each
    return line + ", {} USD ({} to {})".format(*known(money, money * fast, money * slow))


def command_to_write(options: argparse.Namespace, flags: Iterable[Document], name: str, **more: object) -> str:
    """Return the command that writes the answer as a recipe: the one that was typed, with --write.

    name: of the model; more: flags that the command has otherwise
    """
    words = [options.model]
    takes: Fields = {flag: of for group in flags for flag, of in group.items() if flag not in NOT_TYPED}
    for flag, of in takes.items():
        value = more.get(flag, getattr(options, flag))
        if value is None or value is False or value == of.get("default"):  # a price of 0 is neither
            continue
        words.append(f"--{flag}")
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            short = f"{value:g}" if isinstance(value, float) else str(value)
            words.append(short if not isinstance(value, float) or float(short) == value else repr(value))
    to = shlex.quote(str(options.write or f"recipes/my-{name}/"))
    return f"python -m brigade plan {shlex.join(words)} --write {to}"


def command_to_start(recipe: Path, hostfile: str | None) -> str:
    """Return the command that starts the recipe which --write has put there."""
    path = shlex.quote(str(recipe))
    if not hostfile:
        return f"Start: python train.py --recipe {path}"
    return f"Start: python -m brigade launch {path} --hostfile {shlex.quote(hostfile)}"


KEYS = table(Path(__file__).with_name("as_json.yaml"))
SCHEMA = 2  # changes where a key is renamed or removed


def answer_json(answer: Answer, advice: Sequence[str], given: float | None) -> str:
    """Return the answer for a model on a cluster: every strategy, the place of the chosen one or null, and the advice."""
    plans = [
        {"strategy": one.name, "reason": reason(one, answer.winner), "fits": one.fits, "kernels": one.kernels}
        | _numbers(one.estimate, given, one.fits)
        for one in answer.ranked
    ]
    place = answer.ranked.index(answer.winner) if answer.winner else None
    return _whole(plans, place, list(advice))


def recipe_json(result: Estimate, plan: Fields, advice: Sequence[str], given: float | None) -> str:
    """Return the answer for a recipe: one plan, and the advice. plan: strategy, reason and whether it fits"""
    return _whole([plan | {"kernels": ""} | _numbers(result, given, runs=True)], 0, list(advice))


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
