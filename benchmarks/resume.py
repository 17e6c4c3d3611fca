"""Runs go on under every strategy and on any number of ranks, measured -> docs/resume.md.

    python -m benchmarks.resume

Undisturbed runs of 14 steps leave checkpoints after 4; every cell goes on from one of them for ten steps (testing/resume.py).
Runs on as many ranks share one process group. What a run would refuse is asked of its own check, and the reason written down.
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pages import DOCS, markdown, where, write
from brigade.checkpoint import layout
from brigade.cluster import World
from brigade.errors import UserError
from brigade.recipe import flags
from brigade.recipe.batch import batch_arithmetic
from brigade.run.directory import Run
from brigade.strategy import choose
from testing.resume import TOLERANCE, Resume, Side, checkpoint_of, continued, run_of, worst
from testing.runs import run_cases, write_inputs

OF_RANKS = {"full": ("ddp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_nvme", "fsdp2"),
            "LoRA": ("ddp", "zero2", "zero3", "fsdp2"), "QLoRA": ("zero2", "zero3", "fsdp2")}  # fmt: skip
WORLDS = ((2, 1), (2, 3), (2, 4), (4, 2), (4, 3))
BETWEEN = ("ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2", "hsdp")


def of_ranks() -> list[Resume]:
    """Every strategy on other ranks."""
    every = [(method, strategy) for method, strategies in OF_RANKS.items() for strategy in strategies]
    return [Resume(method, Side(name, a), Side(name, b)) for method, name in every for a, b in WORLDS]


def between() -> list[Resume]:
    """Every strategy after every other one, on fewer ranks; HSDP needs its four."""
    pairs = [(before, after) for before in BETWEEN for after in BETWEEN]
    return [Resume("full", Side(a, 4), Side(b, 4 if b == "hsdp" else 2)) for a, b in pairs]


def refused(resume: Resume, shared: list[str], folder: Path) -> str | None:
    """The run's own reason not to begin, or None."""
    ranks = resume.after.ranks
    settings = flags.load([*shared, *continued(resume, folder)["flags"]])
    try:
        strategy = choose(settings, world := World(0, 0, ranks, ranks, "here", "torchrun"))
        batch = batch_arithmetic(settings.recipe.training, ranks, "")
    except UserError as error:
        return error.problem
    found = layout.refusal(
        checkpoint_of(resume.method, resume.before, folder), Run(settings, strategy, world, batch, "", folder)
    )
    return found and found[0].rpartition(": ")[2]


def measure(cells: list[Resume], folder: Path) -> dict[Resume, str]:
    """Raises RuntimeError where a cell is not as it must be, once all have been measured."""
    shared = write_inputs(folder)
    sources: dict[int, dict[str, Any]] = {}
    for cell in cells:
        case = run_of(cell.method, cell.before)
        sources.setdefault(cell.before.ranks, {})[case["name"]] = case
    whole = {
        n: log for ranks, cases in sources.items() for n, log in run_cases(ranks, [*cases.values()], folder).items()
    }
    reasons = {cell: refused(cell, shared, folder) for cell in cells}
    words = {cell: f"refused: {reason}" for cell, reason in reasons.items() if reason}
    wrong = []
    for ranks in sorted({cell.after.ranks for cell in cells}):
        going = [cell for cell in cells if cell not in words and cell.after.ranks == ranks]
        found = run_cases(ranks, [continued(cell, folder) for cell in going], folder)
        for cell in going:
            try:
                difference = worst(found[cell.name], whole[run_of(cell.method, cell.before)["name"]])
            except ValueError as error:
                wrong.append(f"{cell.name}: {error}")
                continue
            words[cell] = f"{difference:.0e}"
            print(cell.name, words[cell], flush=True)
            if difference > TOLERANCE:
                wrong.append(f"{cell.name}: {words[cell]}")
    if wrong:
        raise RuntimeError("\n".join(wrong))
    return words


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        ranks, pairs = of_ranks(), between()
        words = measure(list(dict.fromkeys([*ranks, *pairs])), Path(name))
    lines = [
        [method, strategy, *(words[Resume(method, Side(strategy, a), Side(strategy, b))] for a, b in WORLDS)]
        for method, strategies in OF_RANKS.items()
        for strategy in strategies
    ]
    columns = [f"{a} to {b} ranks" for a, b in WORLDS]
    of_pair = {(cell.before.strategy, cell.after.strategy): words[cell] for cell in pairs}
    table = markdown(["method", "strategy", *columns], lines)
    heads = [f"to {after}" for after in BETWEEN]
    other = markdown(["from", *heads], [[before, *(of_pair[before, after] for after in BETWEEN)] for before in BETWEEN])
    tables = {"ranks": table, "strategies": other, "versions": f"Versions: {where()['versions']}."}
    write(DOCS / "resume.md", tables)


if __name__ == "__main__":
    main()
