"""The first two lines of an answer: whether it fits and what it takes, and the command to go on with."""

import argparse
import math
import shlex
from collections.abc import Iterable
from pathlib import Path

from ...errors.tables import Document, Fields
from ..choice.goals import price, tokens_in_words
from ..costs.estimate import Estimate

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
    line += "; {} tokens in {} hours ({} to {})".format(
        tokens_in_words(asked), *known(hours, hours * fast, hours * slow)
    )
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
    return (
        f"python -m brigade plan {shlex.join(words)} --write {shlex.quote(str(options.write or f'recipes/my-{name}/'))}"
    )


def command_to_start(recipe: Path, hostfile: str | None) -> str:
    """Return the command that starts the recipe which --write has put there."""
    path = shlex.quote(str(recipe))
    if not hostfile:
        return f"Start: python train.py --recipe {path}"
    return f"Start: python -m brigade launch {path} --hostfile {shlex.quote(hostfile)}"
