"""Tensor, sequence, pipeline and expert parallelism give the losses and gradient norms of a single process.

    python -m benchmarks.parity_axes                            # all axes at 2, 4 and 8 ranks -> docs/evidence/parity.md
    python -m benchmarks.parity_axes --only tensor --ranks 4    # only these; the rows of the others stay
    python -m benchmarks.parity_axes --missing                  # only what has no row yet

The cases are those of parity_cases.py, as the tests of ranks build them. Every strategy has a group of processes of its own:
DeepSpeed keeps AutoTP's groups of ranks for all later runs of a process.
"""

import itertools
import tempfile
import time
from collections.abc import Container, Iterator
from functools import partial
from pathlib import Path

from benchmarks import pages
from benchmarks.pages import EVIDENCE, REPOSITORY, Row, markdown
from benchmarks.parity_cases import DAMAGED, NAMES, PLAN, RANKS, Case, cases, order
from brigade.errors.findings import rules
from brigade.errors.tables import table as table_of
from brigade.train.strategy.axes import NAMES as AXIS_NAMES
from testing.parity import worst
from testing.runs import LONG, run_cases

RESULTS = pages.RESULTS / "parity_axes.csv"
PAGE = EVIDENCE / "parity.md"
FIGURES = {"loss": "loss", "grad_norm": "gradient norm", "eval_loss": "held-out loss"}
ONLY_REFUSED = {"single": "one process", "lora": "LoRA", "dora": "DoRA", "qlora": "QLoRA", "qdora": "QDoRA"}
# Rules of lint that train.py goes by too -> what they refuse.
BY_A_RULE = {
    "accelerate-parallelism": ("sequence", "ring attention", "cp_size 2"),
}
OF_A_ROW = ("axis", "ranks", "divided", "strategy", "method")


# ---- measuring ---------------------------------------------------------------------------------------------------
def measure(axis: str, ranks: int, strategies: Container[str], there: Container[tuple[str, ...]] = ()) -> Iterator[Row]:
    """The cases of one axis on so many ranks under some strategies, each beside its run of one process.

    there: those to leave out, as of key()
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        todo = [case for case in cases(axis, ranks, folder) if case.strategy in strategies and key(case) not in there]
        if not todo:
            return
        references = {case.reference["name"]: case.reference for case in todo}
        known = run_cases(1, list(references.values()), folder / "one", steps=LONG)
        for strategy in dict.fromkeys(case.strategy for case in todo):
            group, began = [case for case in todo if case.strategy == strategy], time.monotonic()
            found = run_cases(ranks, [case.run for case in group], folder / strategy, steps=LONG)
            print(
                f"{axis}, {ranks} ranks, {strategy}: {len(group)} cases, {time.monotonic() - began:.0f} s", flush=True
            )
            for case in group:
                yield _row(case, worst(found[case.run["name"]], known[case.reference["name"]]))


def key(case: Case | Row) -> tuple[str, ...]:
    """What tells a case, or its row of results, from all others."""
    said = case if isinstance(case, dict) else vars(case)
    return tuple(str(said[name]) for name in (*OF_A_ROW, "covers"))


def _row(case: Case, difference: dict[str, float]) -> Row:
    figures = {key: f"{difference[key]:.1e}" for key in FIGURES}
    return {key: getattr(case, key) for key in (*OF_A_ROW, "covers")} | figures


# ---- the page ----------------------------------------------------------------------------------------------------
def table(rows: list[Row]) -> str:
    """One line for each division, strategy and method: the largest differences of all its cases."""
    lines: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row[key] for key in OF_A_ROW[1:]), []).append(row)
    found = []
    for (ranks, *words), of in lines.items():
        largest = [f"{max(float(row[key]) for row in of):.1e}" for key in FIGURES]
        found.append([ranks, *words, covers([row["covers"] for row in of]), *largest])
    return markdown(["ranks", "divided", "strategy", "method", "cases", *FIGURES.values()], found)


def covers(words: list[str]) -> str:
    """["accumulation 1", "accumulation 2", "packing"] -> "accumulation 1, 2; packing" """
    counts = [word.removeprefix("accumulation ") for word in words if word.startswith("accumulation ")]
    others = [word for word in words if not word.startswith("accumulation ")]
    return "; ".join(filter(None, [counts and f"accumulation {', '.join(counts)}", *others]))  # type: ignore[list-item]


def damaged(rows: list[Row]) -> str:
    """What every axis shows of a gradient that is 1 % too large on one rank."""
    lines = [[row["divided"], row["strategy"], *(row[key] for key in FIGURES)] for row in rows]
    return markdown(["divided", "strategy", *FIGURES.values()], lines)


def refused() -> str:
    """What train/strategy/refused.yaml says of axes: the combination, and train.py's words."""
    lines = []
    for row in table_of(REPOSITORY / "brigade/train/strategy/refused.yaml"):
        axes = [AXIS_NAMES[axis] for axis, values in row["when"].items() if axis in AXIS_NAMES and True in values]
        words = {
            key: [ONLY_REFUSED.get(word) or NAMES.get(word) or str(word) for word in values]
            for key, values in row["when"].items()
            if key not in AXIS_NAMES and values != [None]
        }
        said = {key: " or ".join(filter(None, [", ".join(names[:-1]), names[-1]])) for key, names in words.items()}
        beside = [said[key] if key in ("kind", "method") else key for key in words]
        if axes:
            problem = row["problem"].format(**said, strategy=said.get("kind"))
            alone = " without a pipeline" * (row["when"].get("stages") == [None])
            lines.append([" x ".join(axes) + alone, ", ".join(beside) or "every strategy", problem])
    lines += [
        [axes, beside, rules()[name].problem.format(value=said)] for name, (axes, beside, said) in BY_A_RULE.items()
    ]
    return markdown(["parallelism", "with", "what train.py says"], lines)


def tables() -> dict[str, str]:
    rows = pages.read(RESULTS)
    whole = [row for row in rows if row["covers"] != DAMAGED]
    found = {f"parity-{axis}": table([row for row in whole if row["axis"] == axis]) for axis in PLAN}
    count, most = len(whole), max(float(row[key]) for row in whole for key in FIGURES)
    versions = "; ".join(dict.fromkeys(row["versions"] for row in rows))
    measured = f"{count} runs. The largest difference of all: {most:.1e}. Versions: {versions}."
    bad = damaged([row for row in rows if row["covers"] == DAMAGED])
    return found | {"axes-measured": measured, "axes-damaged": bad, "axes-refused": refused()}


def main() -> None:
    parser = pages.command_line(__doc__)
    parser.add_argument("--only", choices=PLAN, nargs="+", default=list(PLAN), help="measure only these axes")
    parser.add_argument(
        "--ranks", type=int, choices=RANKS, nargs="+", default=list(RANKS), help="only on so many ranks"
    )
    parser.add_argument("--missing", action="store_true", help="measure only what has no row of results yet")
    parser.add_argument(
        "--strategies", choices=NAMES.values(), nargs="+", default=[*NAMES.values()], help="only under these"
    )
    options = parser.parse_args()
    versions = pages.where()["versions"]
    for axis, ranks in itertools.product(options.only, options.ranks):
        earlier = pages.read(RESULTS) if RESULTS.exists() else []
        there = set(map(key, earlier)) if options.missing else set()
        found = [row | {"versions": versions} for row in measure(axis, ranks, options.strategies, there)]
        again = {(axis, str(ranks), strategy) for strategy in options.strategies if not options.missing}
        kept = [row for row in earlier if (row["axis"], row["ranks"], row["strategy"]) not in again]
        pages.save(
            RESULTS, sorted([*kept, *found], key=partial(order, PLAN))
        )  # after each, so that nothing is measured twice
    pages.write(PAGE, tables())


if __name__ == "__main__":
    main()
