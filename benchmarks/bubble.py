"""How long the ranks of a pipeline idle in a step, for every schedule, beside the formulas of the papers.

    python -m benchmarks.bubble             # measures -> benchmarks/results/bubble.jsonl, docs/evidence/pipeline.*
    python -m benchmarks.bubble --quick     # two ranks, four micro-batches, passes stretched; prints and writes nothing

Ranks are processes of this machine that run train.py. "computed": two ranks do nothing but their arithmetic, on a core each.
"stretched": the model is tiny, and each pass of a layer sleeps until it has taken SECONDS, so that ranks need no core of their
own.
"""

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import bubble_lines, pages
from benchmarks.bubble_lines import Pass
from benchmarks.bubble_tables import PAGE, RESULTS, draw, tables, whole_table
from benchmarks.pages import REPOSITORY, Row
from brigade.train.engines.parallel import pipeline_schedule
from brigade.train.strategy.axes import Axes
from testing.axes_pipeline import SCHEDULES, ddp
from testing.command_line import as_flags
from testing.on_ranks import on_ranks

MICRO_BATCHES = (2, 4, 8)
SECONDS = (
    0.04  # of a layer's forward pass, of its gradients of inputs and of those of weights, where they are stretched
)
WARM_UP = 1  # steps
DRAWN = ("stretched", 4, 8)  # way, ranks, micro-batches


@dataclass(frozen=True)
class Way:
    """seconds: of a layer's pass, at least; length: tokens of a micro-batch; sizes: of a model whose head costs less than one of
    its eight layers, so that all ranks have as many of them"""

    ranks: tuple[int, ...]
    seconds: float
    length: int
    steps: int
    sizes: dict[str, int]


WAYS = {
    "computed": Way((2,), 0.0, 256, 5, {"hidden_size": 384, "intermediate_size": 1536}),
    "stretched": Way((2, 4), SECONDS, 32, 3, {"hidden_size": 32, "intermediate_size": 1536}),
}
Steps = list[list[list[Pass]]]  # of each step and rank the passes


def axes(name: str, ranks: int) -> Axes:
    said = SCHEDULES[name]
    return Axes(stages=ranks, schedule=said.get("schedule", ""), virtual=said.get("virtual_stages", 1))


def cases(ranks: int, micro_batches: Iterable[int] = MICRO_BATCHES) -> list[tuple[str, int]]:
    """(schedule, micro-batches) of all that run on so many ranks."""
    return [
        (name, m) for m in micro_batches for name in SCHEDULES if not pipeline_schedule.refusal(axes(name, ranks), m)
    ]


# ---- measuring -------------------------------------------------------------------------------------------------------
def measure(name: str, ranks: int, micro_batches: Iterable[int] = MICRO_BATCHES) -> list[Row]:
    """One row for each schedule and number of micro-batches."""
    todo = cases(ranks, micro_batches)
    found = record(WAYS[name], ranks, todo)
    return [row(name, schedule, ranks, m, *of) for (schedule, m), of in zip(todo, found, strict=True)]


def record(way: Way, ranks: int, todo: list[tuple[str, int]]) -> list[tuple[list[int], Steps]]:
    """Return the layers of each rank, and all steps but the first, for each (schedule, micro-batches).

    Raises RuntimeError when a rank fails.
    """
    from benchmarks import bubble_worker  # imports torch

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        config = json.loads((REPOSITORY / "recipes/tiny/config.json").read_text()) | way.sizes
        config |= {"num_hidden_layers": 8, "num_attention_heads": 4, "head_dim": way.sizes["hidden_size"] // 4}
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(config))
        jobs = []
        for name, m in todo:
            flags = as_flags(
                model_name_or_path=str(folder / "model"),
                output_dir=str(folder / f"{name}-{m}"),
                max_steps=WARM_UP + way.steps,
                global_batch_size=m,
                per_device_train_batch_size=1,
                max_length=way.length,
                packing=True,
                max_eval_samples=2,
                eval_answers=0,
                eval_steps=None,
                save_steps=None,
                report_to="",
            )
            flags += ddp(folder, ranks, **SCHEDULES[name])
            jobs.append({"flags": flags, "seconds": way.seconds})
        found = []
        for each in zip(*on_ranks(bubble_worker.lines_of, jobs, ranks=ranks, timeout=1800), strict=True):
            steps = [list(lines) for lines in zip(*(one["steps"] for one in each), strict=True)]
            found.append(([one["layers"] for one in each], steps[WARM_UP:]))
        return found


def row(way: str, name: str, ranks: int, m: int, layers: list[int], steps: Steps) -> Row:
    """What the page needs of one case: of its step of middle length. steps: the time lines of all ranks for each"""
    steps = sorted(steps, key=bubble_lines.step_seconds)
    lines = steps[len(steps) // 2]
    seconds = [bubble_lines.step_seconds(step) for step in steps]
    own = axes(name, ranks)
    found: Row = {
        "way": way,
        "schedule": own.chosen_schedule,
        "ranks": ranks,
        "virtual": own.virtual,
        "micro_batches": m,
        "layers": layers,
        "seconds": round(seconds[len(steps) // 2], 4),
        "all_seconds": [round(each, 4) for each in seconds],
        "formula": _rounded(pipeline_schedule.bubble(own, m)),
        "by_order": [_rounded(share) for share in bubble_lines.by_order(lines)],
        "idle": [_rounded(share) for share in bubble_lines.idle(lines)],
        "idle_between": [_rounded(share) for share in bubble_lines.idle_between(lines)],
        "at_their_own_times": [_rounded(share) for share in bubble_lines.at_their_own_times(lines)],
        "held": [bubble_lines.held(line) for line in lines],
        "per_micro_batch": [{kind: _rounded(_seconds(line, kind) / m) for kind in "FBIW"} for line in lines],
    }
    if (way, ranks, m) == DRAWN:
        start = min(line[0][3] for line in lines)
        found["lines"] = [[(*each[:3], *(round(at - start, 4) for at in each[3:])) for each in line] for line in lines]
    return found


def _seconds(line: Iterable[Pass], kind: str) -> float:
    return sum(end - begin for _, one, _, begin, end in line if one == kind)


def _rounded(figure: float) -> float:
    return round(figure, 5)


def main() -> int:
    parser = pages.command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="two ranks, four micro-batches; writes nothing")
    groups = {f"{name}-{ranks}": (name, ranks) for name, way in WAYS.items() for ranks in way.ranks}
    parser.add_argument("--only", choices=groups, help="measure these again, and keep the other results")
    options = parser.parse_args()
    if options.quick:
        print(whole_table(measure("stretched", 2, [4]), 2))
        return 0
    rows = pages.read(RESULTS) if options.only else []
    where = pages.where()
    for name, ranks in [groups[options.only]] if options.only else groups.values():
        rows = [each for each in rows if (each["way"], each["ranks"]) != (name, ranks)]
        rows += [each | where for each in measure(name, ranks)]
    pages.save(RESULTS, rows)
    pages.write(PAGE, tables())
    draw(pages.read(RESULTS), PAGE.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
