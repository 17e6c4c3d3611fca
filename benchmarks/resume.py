"""Runs go on under every strategy and on any number of ranks, measured -> docs/evidence/resume.md.

    python -m benchmarks.resume                    # everything
    python -m benchmarks.resume --only divided     # one table; the others stay

Undisturbed runs of 14 steps leave checkpoints after 4; every cell goes on from one of them for ten steps (testing/resume.py).
Runs on as many ranks share one process group. What a run would refuse is asked of its own check, and the reason written down.
"""

import tempfile
from pathlib import Path

from benchmarks.pages import EVIDENCE, command_line, markdown, where, write
from brigade.errors import UserError
from brigade.train.checkpoint import compatibility
from brigade.train.host.cluster import World
from brigade.train.recipe import flags
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.run.directory import Run
from brigade.train.strategy import choose
from testing.resume import DIVIDED, TOLERANCE, Resume, Side, checkpoint_of, continued, in_groups, run_of, worst
from testing.runs import LONG, write_inputs

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
        batch = batch_arithmetic(settings.recipe.training, strategy.axes.data(ranks), "")
    except UserError as error:
        return error.problem
    found = compatibility.refusal(
        checkpoint_of(resume.method, resume.before, folder), Run(settings, strategy, world, batch, "", folder)
    )
    return found and found[0].rpartition(": ")[2]


def measure(cells: list[Resume], folder: Path) -> dict[Resume, str]:
    """Raises RuntimeError where a cell is not as it must be, once all have been measured."""
    shared = write_inputs(folder)
    whole = in_groups([(cell.before, run_of(cell.method, cell.before)) for cell in cells], folder, LONG)
    reasons = {cell: refused(cell, shared, folder) for cell in cells}
    words = {cell: f"refused: {reason}" for cell, reason in reasons.items() if reason}
    going = [cell for cell in cells if cell not in words]
    found = in_groups([(cell.after, continued(cell, folder)) for cell in going], folder, LONG)
    wrong = []
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
    parser = command_line(__doc__)
    parser.add_argument("--only", choices=CELLS, nargs="+", default=list(CELLS), help="only these tables")
    asked = parser.parse_args().only
    with tempfile.TemporaryDirectory() as name:
        words = measure(list(dict.fromkeys(cell for table in asked for cell in CELLS[table]())), Path(name))
    tables = {table: TABLES[table](words) for table in asked}
    write(EVIDENCE / "resume.md", tables | {"versions": f"Versions: {where()['versions']}."})


def table_of_ranks(words: dict[Resume, str]) -> str:
    lines = [
        [method, strategy, *(words[Resume(method, Side(strategy, a), Side(strategy, b))] for a, b in WORLDS)]
        for method, strategies in OF_RANKS.items()
        for strategy in strategies
    ]
    return markdown(["method", "strategy", *(f"{a} to {b} ranks" for a, b in WORLDS)], lines)


def table_of_strategies(words: dict[Resume, str]) -> str:
    of_pair = {(cell.before.strategy, cell.after.strategy): words[cell] for cell in between()}
    heads = [f"to {after}" for after in BETWEEN]
    return markdown(["from", *heads], [[before, *(of_pair[before, after] for after in BETWEEN)] for before in BETWEEN])


def table_of_divided(words: dict[Resume, str]) -> str:
    lines = [
        [cell.method, *(f"{side.strategy}, {side.ranks}" for side in (cell.before, cell.after)), words[cell]]
        for cell in DIVIDED
    ]
    return markdown(["method", "from, ranks", "to, ranks", "difference"], lines)


CELLS = {"ranks": of_ranks, "strategies": between, "divided": lambda: DIVIDED}
TABLES = {"ranks": table_of_ranks, "strategies": table_of_strategies, "divided": table_of_divided}

if __name__ == "__main__":
    main()
