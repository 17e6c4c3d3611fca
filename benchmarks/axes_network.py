"""What two hosts send each other in a step, and how long it takes on slow links, where layers or matrices are divided too.

    sudo .venv/bin/python -m benchmarks.axes_network    # measures -> results/axes_network.jsonl, docs/evidence/network.md
    python -m benchmarks.axes_network --quick           # a pipeline and tensor groups at one rate; prints and writes nothing

As benchmarks/communication.py: train.py in bf16 on two hosts of the testbed, on a Llama of five million parameters. Every
strategy computes the same global batch in micro-batches of the same size. All rows have as many tokens, so that what a stage
hands on can be held against the formula.
"""

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.communication import HEADER, HOSTS
from benchmarks.network import LENGTH, MICRO_BATCH, RELEASED, flags_for, job, run
from benchmarks.network_tables import NAMES, PAGE, two
from benchmarks.pages import Row, markdown
from benchmarks.published.traffic import per_node
from benchmarks.states import MODEL
from brigade.plan.costs.job import Job, axis_fields
from brigade.plan.shape.find import named_shape
from brigade.plan.shape.model_shape import ModelShape
from brigade.train.strategy.axes import Axes
from testbed.cluster import Cluster
from testbed.needs import require

RESULTS = pages.RESULTS / "axes_network.jsonl"
GLOBAL_BATCH = 32  # sequences
RATES = (None, "1gbit", "200mbit")
WARM_UP, MEASURED = 2, 5  # steps; one more between them is dropped, in which TCP finds its rate


PLAIN = Axes()


@dataclass(frozen=True)
class Strategy:
    """engine, stage: a Job's; per_host: ranks on each of two hosts"""

    name: str
    engine: str
    stage: int
    flags: tuple[str, ...]
    per_host: int
    axes: Axes = PLAIN

    @property
    def accumulation(self) -> int:
        return GLOBAL_BATCH // MICRO_BATCH // self.axes.data(HOSTS * self.per_host)

    def job(self, shape: ModelShape) -> Job:
        spread: dict[str, Any] = {"engine": self.engine, "stage": self.stage} | axis_fields(
            self.axes, HOSTS * self.per_host
        )
        return Job(
            shape,
            LENGTH,
            micro_batch=MICRO_BATCH,
            accumulation=self.accumulation,
            node_size=self.per_host,
            **spread,
        )


STAGES = {"distributed_type": "MULTI_GPU", "parallelism_config": {"parallelism_config_pp_size": 2}}
DDP, PIPELINE = ("--ds_config", "none"), ("--accelerate_config", json.dumps(STAGES))
ZERO3, IN_3D = (("--ds_config", path) for path in (RELEASED, "ds_configs/zero1_tp2_pp2.json"))
STRATEGIES = (
    Strategy("DDP", "ddp", 0, DDP, 1),
    Strategy("ZeRO-3", "zero", 3, ZERO3, 1),
    Strategy("pipeline of 2", "ddp", 0, PIPELINE, 1, Axes(stages=2)),
    Strategy("DDP", "ddp", 0, DDP, 2),
    Strategy("ZeRO-3", "zero", 3, ZERO3, 2),
    Strategy("pipeline of 2 x DDP", "ddp", 0, PIPELINE, 2, Axes(stages=2)),
    Strategy("tensor 2 x ZeRO-1", "zero", 1, ("--ds_config", "ds_configs/zero1_tp2.json"), 2, Axes(tensor=2)),
    Strategy("tensor 2 x pipeline of 2", "zero", 1, IN_3D, 2, Axes(tensor=2, stages=2)),
)
QUICK = STRATEGIES[5:7]


# ---- measuring ---------------------------------------------------------------------------------------------------
def prepare(folder: Path) -> tuple[list[str], ModelShape]:
    """(flags that all runs share, shape of the model), which lie in `folder` with rows that are all cut to LENGTH tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(Path("recipes/tiny/config.json").read_text()) | MODEL | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    for name, count in (("train", GLOBAL_BATCH), ("held-out", 8)):
        asked = ({"role": "user", "content": f"Question {i} of {name}"} for i in range(count))
        chats = [{"messages": [one, {"role": "assistant", "content": "again " * LENGTH}]} for one in asked]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    files = {"train_file": str(folder / "train.jsonl"), "validation_file": str(folder / "held-out.jsonl")}
    recipe: dict[str, Any] = {
        "model": {"model_name_or_path": str(folder), "from_scratch": True, "tokenizer_name_or_path": "python-docs"},
        "data": {**files, "chat_template": "chatml"},
        "training": {"learning_rate": 1e-4},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    flags = ["--recipe", str(folder / "recipe.yaml"), "--bf16", "true", "--eval_answers", "0"]
    return flags, named_shape(str(folder))


def measure(
    cluster: Cluster,
    plan: tuple[Strategy, ...] = STRATEGIES,
    rates: tuple[str | None, ...] = RATES,
    measured: int = MEASURED,
) -> list[Row]:
    """One row per strategy and rate."""
    shared, shape = prepare(cluster.shared / "axes-network")
    jobs: dict[tuple[int, int], list[Row]] = {}
    for of in plan:
        steps = WARM_UP + len(rates) * (1 + measured)
        flags = [*shared, *flags_for(steps, GLOBAL_BATCH, evaluated=8), *of.flags]
        run_of_it = job(STRATEGIES.index(of), of.accumulation, flags, rates, WARM_UP, measured)
        # DeepSpeed keeps its tensor groups until the process ends.
        jobs.setdefault((of.per_host, of.axes.tensor), []).append(run_of_it)
    rows = []
    for (per_host, _), some in jobs.items():
        names = ", ".join(STRATEGIES[one["strategy"]].name for one in some)
        print(f"{time.strftime('%H:%M:%S')} {names} ...", flush=True)
        for found in run(cluster, HOSTS, per_host, some):
            rows += _rows(found, shape)
    return rows


def _rows(found: Row, shape: ModelShape) -> list[Row]:
    of = STRATEGIES[found["strategy"]]
    formula = [round(node.total) for node in per_node(of.job(shape), gloo=True)]
    rows = []
    for rate, block in zip(found["rates"], found["blocks"], strict=True):
        payload = [round(count - HEADER * packets) for count, packets in block["by_rank"][:: of.per_host]]
        rows.append(
            {
                "strategy": of.name,
                "ranks_per_host": of.per_host,
                "accumulation": found["accumulation"],
                "rate": rate or "unlimited",
                "seconds": [round(one, 4) for one in block["seconds"]],
                "payload": payload,
                "formula": formula,
                "difference_percent": round(100 * (sum(payload) / sum(formula) - 1), 2),
            }
        )
    return rows


# ---- the tables --------------------------------------------------------------------------------------------------
def table(rows: list[Row]) -> str:
    """MB that each host sends, and the median seconds of a step at each rate."""
    cases: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["ranks_per_host"], row["strategy"]), []).append(row)
    lines = []
    for (per_host, name), of in cases.items():
        first = of[0]
        sent, formula = (" and ".join(f"{count / 1e6:.2f}" for count in first[key]) for key in ("payload", "formula"))
        seconds = [f"{two(statistics.median(row['seconds']))} s" for row in of]
        lines.append([name, f"{HOSTS} x {per_host}", str(first["accumulation"]), sent, formula, *seconds])
    rates: list[str] = [NAMES.get(row["rate"]) or str(row["rate"]) for row in next(iter(cases.values()))]
    return markdown(["strategy", "hosts x ranks", "accumulation", "MB sent per host", "by formula", *rates], lines)


def tables() -> dict[str, str]:
    rows = pages.read(RESULTS)
    worst = max(rows, key=lambda row: abs(row["difference_percent"]))
    measured = (
        f"Largest difference between what two hosts sent and the formula: {abs(worst['difference_percent']):.1f} % "
        f"({worst['strategy']}, {NAMES.get(worst['rate'], worst['rate'])}).\n\n"
        f"Measured on: {rows[0]['machine']}; {rows[0]['versions']}."
    )
    return {"axes": table(rows), "axes-measured": measured}


def main() -> int:
    parser = pages.command_line(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help=f"{', '.join(of.name for of in QUICK)} without a limit; writes nothing"
    )
    options = parser.parse_args()
    require()
    with Cluster(HOSTS) as cluster:
        rows = measure(cluster, QUICK, (None,)) if options.quick else measure(cluster)
    if options.quick:
        print(table(rows))
        return 0
    where = pages.where()
    pages.save(RESULTS, [row | where for row in rows])
    pages.write(PAGE, tables())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
