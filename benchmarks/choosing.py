"""docs/evidence/choosing.md: what `plan` chooses for models, lengths and clusters, and how far it is ahead of data parallelism.

python -m benchmarks.choosing            # write the page's tables
python -m benchmarks.choosing --check    # 1 where the page is out of date
"""

import argparse
import os
import shlex
from dataclasses import dataclass
from unittest.mock import patch

from brigade.errors import UserError
from brigade.plan import command as plan
from brigade.plan.choice.explain import not_weighed, reason
from brigade.plan.choice.search import MUCH, candidates, chosen, fastest
from brigade.plan.choice.workload import Candidate
from brigade.plan.hardware import calibration

from .pages import EVIDENCE, command, markdown

PAGE = EVIDENCE / "choosing.md"
LONG = "--max_length 131072 --global_batch_size 16"
ROWS = {
    "Llama 3.1 8B": "llama-3.1-8b",
    "Llama 3.1 8B, LoRA": "llama-3.1-8b --method lora",
    "Llama 3.1 8B, 128k tokens": f"llama-3.1-8b {LONG}",
    "Qwen3 32B": "qwen3-32b",
    "Llama 3.1 70B": "llama-3.1-70b",
    "Llama 3.1 70B, LoRA, 128k tokens": f"llama-3.1-70b --method lora {LONG}",
    "Llama 3.1 405B": "llama-3.1-405b",
    "Qwen3 30B A3B": "qwen3-30b-a3b",
    "gpt-oss 120B": "gpt-oss-120b",
    "Qwen3 235B A22B": "qwen3-235b-a22b",
}
COLUMNS = {
    "one host": "--hostfile hostfiles/1x8 --gpu H100",
    "two hosts, 200 Gbit/s": "--hostfile hostfiles/2x8 --gpu H100 --network '200 Gb/s'",
    "four hosts": "--hostfile hostfiles/4x8 --gpu H100",
    "four hosts, 25 Gbit/s": "--hostfile hostfiles/4x8 --gpu H100 --network '25 Gb/s'",
    "16 hosts": "--hostfile hostfiles/16x8 --gpu H100",
    "16 hosts, 100 Gbit/s": "--hostfile hostfiles/16x8 --gpu H100 --network '100 Gb/s'",
}


@dataclass(frozen=True)
class Answer:
    """The answers of one command.

    best: its choice, or what is possible and slow; plain: that among strategies that divide the data alone; None: nothing fits
    why: what plain lacks
    """

    command: str
    best: Candidate | None
    plain: Candidate | None
    why: str


def answer(row: str, column: str) -> Answer:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    words = f"{row} {column}"
    workload, cluster = plan.asked(parser.parse_args(shlex.split(words)))
    try:
        ranked = candidates(workload, cluster)
    except UserError as error:
        return Answer(f"python -m brigade plan {words}", None, None, error.problem)
    undivided = [one for one in ranked if not one.choice.axes]
    best, plain = (chosen(among) or fastest(among) for among in (ranked, undivided))
    other = plain or next((one for one in undivided if not (one.choice.offload or one.refused)), None)
    why = f"{other.name}: {reason(other, best)}" if other else f"{workload.batch} sequences, {cluster.gpus} GPUs"
    return Answer(f"python -m brigade plan {words}", best, plain, why)


def told(candidate: Candidate | None) -> str:
    """`ZeRO-3, 1,240`: tokens per second on each GPU. What is possible and slow is not recommended: `slow: ZeRO-3 NVMe, 17`."""
    if candidate is None:
        return "nothing fits"
    return f"{'slow: ' * candidate.estimate.slow}{candidate.name}, {candidate.estimate.tokens_per_second_per_gpu:,.0f}"


def but(best: Candidate, plain: Candidate | None) -> str:
    """Return why the choice is not one with only data parallelism, where that is faster by formula; or ""."""
    if plain is None or plain.seconds >= best.seconds:
        return ""
    if not_weighed(plain, best):
        return ": hosts' memory not told"
    if plain.lighter and not best.lighter:
        return f": 8-bit moments, less than {MUCH} times as fast"
    return ": as fast, less simple"


def cell(found: Answer) -> str:
    if found.best is None or not found.best.choice.axes:
        return told(found.best)
    return f"**{told(found.best)}** ({told(found.plain)}{but(found.best, found.plain)})"


def tables() -> dict[str, str]:
    """Every table of the page. The factors of nobody's own cluster count."""
    with patch.dict(os.environ, {calibration.VARIABLE: ""}):
        found = {(row, column): answer(ROWS[row], COLUMNS[column]) for row in ROWS for column in COLUMNS}
    decisions = [[row, *(cell(found[row, column]) for column in COLUMNS)] for row in ROWS]
    divided = {(row, one.best.choice.axes): (row, column) for (row, column), one in reversed(found.items()) if one.best}
    first = [place for place in found if place in divided.values()]
    reasons = [
        [*place, one.best.name, one.why] for place in first if (one := found[place]).best and one.best.choice.axes
    ]
    words = [[title, f"`{words}`"] for title, words in (ROWS | COLUMNS).items()]
    return {
        "choices": markdown(["", *COLUMNS], decisions),
        "reasons": markdown(["model", "cluster", "chosen", "instead of"], reasons),
        "commands": markdown(["row or column", "words of the command"], words),
    }


def main(argv: list[str] | None = None) -> int:
    return command(PAGE, tables, str(__doc__), argv)


if __name__ == "__main__":
    raise SystemExit(main())
