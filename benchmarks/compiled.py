"""What holds with compiled layers, by Inductor on a CPU: losses beside those of one process that compiles nothing, and how many
programs torch makes.

    python -m benchmarks.compiled                           # -> benchmarks/results/compiled.jsonl and docs/evidence/compiled.md
    python -m benchmarks.compiled --only zero3 fsdp2        # these strategies anew

Each combination is a run of testing/compiling.py in a process group of its own.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pages import EVIDENCE, RESULTS, Row, command_line, markdown, read, save, where, write
from testing import parity, runs
from testing.compiling import ALONE, STRATEGIES, WITH, case, name_of, reference

PAGE, FOUND = EVIDENCE / "compiled.md", RESULTS / "compiled.jsonl"
PATIENCE = 600.0  # seconds for one combination


def measured(strategy: str, addition: str, alone: dict[str, Any], folder: Path) -> Row:
    """Return the row of one combination. alone: the losses of one process that compiles nothing"""
    about = case(strategy, addition)
    row = {"strategy": strategy, "with": addition} | where()
    try:
        found = runs.run_cases(about["ranks"], [about], folder, PATIENCE)[about["name"]]
    except RuntimeError as error:
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = [
            line for line in said if line.startswith(("error", "problem", "torch.", "RuntimeError", "AssertionError"))
        ]
        return row | {"failed": (told or said)[-1][:300]}
    programs = found["programs"]
    return row | parity.worst(found, alone) | {"programs": programs[0], "later": programs[-1] - programs[0]}


def measure(strategies: list[str], additions: list[str]) -> None:
    """Run each combination of these, and keep each row as soon as it is there."""
    with tempfile.TemporaryDirectory() as name:
        folder, alone = Path(name), {}
        for strategy in strategies:
            for addition in [""] if strategy in ALONE else additions:
                if addition not in alone:
                    one = reference(addition)
                    alone[addition] = runs.run_cases(1, [one], folder)[one["name"]]
                row = measured(strategy, addition, alone[addition], folder)
                kept = read(FOUND) if FOUND.exists() else []
                save(FOUND, [*(old for old in kept if key(old) != key(row)), row])
                print(name_of(strategy, addition), row.get("failed") or row, file=sys.stderr, flush=True)


def key(row: Row) -> tuple[str, str]:
    return row["strategy"], row["with"]


def cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return row["failed"]
    return f"{max(row[name] for name in ('loss', 'grad_norm', 'eval_loss')):.0e}; {row['programs']}; {row['later']}"


def tables() -> dict[str, str]:
    """Return the page's tables, of the committed results."""
    rows = {key(row): row for row in read(FOUND)}
    columns = [name for name in STRATEGIES if any(strategy == name for strategy, _ in rows)]
    grid = [[addition or "nothing else", *(cell(rows.get((name, addition))) for name in columns)] for addition in WITH]
    last = list(rows.values())[-1]
    return {
        "compiled-machine": f"{last['machine']}; {last['versions']}",
        "compiled": markdown(["with", *columns], grid),
    }


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), help="these strategies anew")
    parser.add_argument("--with", nargs="+", dest="additions", choices=WITH, default=list(WITH), help="only with these")
    options = parser.parse_args()
    measure(options.only, options.additions)
    write(PAGE, tables())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
