"""Bytes that a host really sends per optimizer step, for every strategy, beside the formulas of benchmarks/published/traffic.py.

    sudo .venv/bin/python -m benchmarks.communication   # measures: results/communication.jsonl, docs/evidence/communication.*
    python -m benchmarks.communication --quick          # ZeRO-2 and FSDP2 with accumulation 2; prints and writes nothing

Two hosts of the testbed run train.py on a Llama of five million parameters; the counters of their network cards are read at
the ends of steps. As in benchmarks/network.py, whose group of ranks this uses, but in bf16 and without throttled links.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.network import MICRO_BATCH, RELEASED, flags_for, job, run
from benchmarks.pages import EVIDENCE, Row, markdown
from benchmarks.published.traffic import Traffic, traffic, unreleased
from benchmarks.states import MODEL
from brigade.plan.shape.find import named_shape
from brigade.plan.shape.model_shape import ModelShape
from testbed.cluster import Cluster
from testbed.needs import require

PAGE = EVIDENCE / "communication.md"
RESULTS = pages.RESULTS / "communication.jsonl"
HOSTS = 2
WARM_UP, MEASURED = 3, 8  # steps; one more between them is dropped
HEADER = 14 + 20 + 32  # bytes of Ethernet, IPv4 and TCP with timestamps, per packet that the card is given


@dataclass(frozen=True)
class Strategy:
    """kind, shard, hpz: as traffic() takes them; per_host: ranks on each host; keeps: all weights, until the backward pass."""

    kind: str
    flags: tuple[str, ...]
    per_host: int = 1
    shard: int = 0
    hpz: int = 0
    keeps: bool = False


def _ds_config(name: str) -> tuple[str, ...]:
    return ("--ds_config", f"ds_configs/{name}.json")


STRATEGIES = {
    "DDP": Strategy("ddp", ("--ds_config", "none")),
    **{f"ZeRO-{stage}": Strategy(f"zero{stage}", _ds_config(f"zero{stage}")) for stage in (1, 2)},
    "ZeRO-3": Strategy("zero3", ("--ds_config", RELEASED)),
    "ZeRO-3, kept": Strategy("zero3", _ds_config("zero3"), keeps=True),
    "FSDP2": Strategy("fsdp2", ("--accelerate_config", "accelerate_configs/fsdp2_1x2.yaml")),
    "ZeRO-3 hpZ": Strategy("zero3", _ds_config("zero3_hpz"), 2, hpz=2),
    "HSDP": Strategy("fsdp2", ("--accelerate_config", "accelerate_configs/hsdp_1x4.yaml"), 2, shard=2),
}
Plan = dict[str, tuple[int, ...]]  # strategy -> accumulations
PLAN: Plan = dict.fromkeys(STRATEGIES, (1, 4))
QUICK: Plan = {"ZeRO-2": (2,), "FSDP2": (2,)}


# ---- measuring ---------------------------------------------------------------------------------------------------
def measure(cluster: Cluster, plan: Plan = PLAN, measured: int = MEASURED) -> list[Row]:
    """One row per strategy and accumulation; strategies with as many ranks share a process group."""
    model = cluster.shared / "communication-model"
    model.mkdir(exist_ok=True)
    config = json.loads(Path("recipes/tiny/config.json").read_text()) | MODEL | {"tie_word_embeddings": False}
    (model / "config.json").write_text(json.dumps(config))
    shape, rows = named_shape(str(model)), []
    for per_host in sorted({STRATEGIES[name].per_host for name in plan}):
        jobs = []
        for name, k in ((name, k) for name, of in plan.items() for k in of if STRATEGIES[name].per_host == per_host):
            flags = flags_for(WARM_UP + 1 + measured, MICRO_BATCH * HOSTS * per_host * k, evaluated=8)
            flags += [*STRATEGIES[name].flags, "--model_name_or_path", str(model), "--bf16", "true"]
            jobs.append(job(name, k, flags, (None,), WARM_UP, measured))
        print(f"{time.strftime('%H:%M:%S')} {per_host} rank(s) on each of {HOSTS} hosts ...", flush=True)
        rows += [_row(found, shape) for found in run(cluster, HOSTS, per_host, jobs)]
    return rows


def by_formula(name: str, accumulation: int, shape: ModelShape, gloo: bool = True) -> Traffic:
    of = STRATEGIES[name]
    # ZeRO-3 keeps parameters below ten times the hidden size whole: here the norms.
    whole = (2 * shape.layers + 1) * shape.hidden if of.kind == "zero3" else 0
    kept = unreleased(shape) if of.kind == "fsdp2" else (shape.parameters - whole) * of.keeps
    return traffic(
        of.kind,
        shape.parameters,
        HOSTS,
        of.per_host,
        accumulation,
        shard=of.shard,
        hpz=of.hpz,
        kept=kept,
        whole=whole,
        gloo=gloo,
    )


def _row(found: Row, shape: ModelShape) -> Row:
    if found["parameters"] != shape.parameters:
        raise RuntimeError(f"the model has {found['parameters']} parameters, its shape {shape.parameters}")
    name, k, (block,) = found["strategy"], found["accumulation"], found["blocks"]
    payload, formula = block["bytes"] - HEADER * block["packets"], by_formula(name, k, shape)
    return {
        "strategy": name,
        "accumulation": k,
        "hosts": HOSTS,
        "ranks_per_host": STRATEGIES[name].per_host,
        "parameters": shape.parameters,
        "steps": len(block["seconds"]),
        "sent": round(block["bytes"]),
        "packets": round(block["packets"]),
        "payload": round(payload),
        "formula_gradients": round(formula.reduced),
        "formula_weights": round(formula.gathered),
        "difference_percent": round(100 * (payload / formula.total - 1), 2),
    }


# ---- the tables and the plot --------------------------------------------------------------------------------------
def table(rows: list[Row]) -> str:
    """MB per host and step."""
    lines = []
    for row in rows:
        parts = row["formula_gradients"], row["formula_weights"]
        headers = 100 * (row["sent"] / row["payload"] - 1)
        figures = [f"{number / 1e6:.3f}" for number in (row["sent"], row["payload"], *parts, sum(parts))]
        lines.append(
            [
                row["strategy"],
                f"{row['hosts']} x {row['ranks_per_host']}",
                str(row["accumulation"]),
                figures[0],
                f"{headers:.2f} %",
                *figures[1:],
                f"{row['difference_percent']:+.2f} %",
            ]
        )
    return markdown(
        [
            "strategy",
            "hosts x ranks",
            "accumulation",
            "sent, MB",
            "headers",
            "payload, MB",
            "gradients by formula",
            "weights by formula",
            "together",
            "payload against formula",
        ],
        lines,
    )


def draw(rows: list[Row], path: Path) -> None:
    """Bytes per parameter: stacked bars by formula, a mark for what was counted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"formula_gradients": "#E69F00", "formula_weights": "#0072B2"}  # Okabe and Ito: colour-blind-safe
    figure, axis = plt.subplots(figsize=(12, 4.6), layout="constrained")
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    places = [3 * names.index(row["strategy"]) + (row["accumulation"] > 1) for row in rows]
    for x, row in zip(places, rows, strict=True):
        bottom = 0.0
        for part, colour in colours.items():
            axis.bar(x, row[part] / row["parameters"], 0.82, bottom, color=colour, zorder=2)
            bottom += row[part] / row["parameters"]
        counted = row["payload"] / row["parameters"]
        axis.plot(x, counted, "D", color="black", markeredgecolor="white", markersize=6, zorder=3)
        axis.annotate(
            f"{counted:.1f}", (x, max(bottom, counted)), (0, 7), "data", "offset points", ha="center", fontsize=9
        )
    axis.set_xticks(places, [f"k = {row['accumulation']}" for row in rows])
    top = 1.18 * max(row["payload"] / row["parameters"] for row in rows)
    for index, name in enumerate(names):
        ranks = HOSTS * STRATEGIES[name].per_host
        axis.annotate(f"{name}\n{ranks} ranks", (3 * index + 0.5, top), ha="center", va="top", fontweight="bold")
    axis.set_ylim(0, 1.02 * top)
    axis.set_ylabel("bytes sent per parameter, host and step")
    axis.grid(axis="y", color="#dddddd", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    handles: list[Any] = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    handles.append(plt.Line2D([], [], marker="D", color="black", markeredgecolor="white", linestyle=""))
    names = ["gradients, by formula over gloo", "weights, by formula", "counted on the network card, without headers"]
    figure.legend(handles, names, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def tables() -> dict[str, str]:
    rows = pages.read(RESULTS)
    worst = max(rows, key=lambda row: abs(row["difference_percent"]))
    headers = [100 * (row["sent"] / row["payload"] - 1) for row in rows]
    measured = (
        f"Largest difference between payload and formula: {abs(worst['difference_percent']):.2f} % ({worst['strategy']}, "
        f"accumulation {worst['accumulation']}). Headers and acknowledgements: {min(headers):.2f} to {max(headers):.2f} % of "
        f"the payload.\n\nMeasured on: {rows[0]['machine']}; {rows[0]['versions']}."
    )
    return {"counted": table(rows), "measured": measured}


def main() -> int:
    parser = pages.command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="ZeRO-2 and FSDP2 with accumulation 2; writes nothing")
    options = parser.parse_args()
    require()
    with Cluster(HOSTS) as cluster:
        rows = measure(cluster, QUICK if options.quick else PLAN)
    if options.quick:
        print(table(rows))
        return 0
    where = pages.where()
    pages.save(RESULTS, [row | where for row in rows])
    pages.write(PAGE, tables())
    draw(pages.read(RESULTS), PAGE.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
