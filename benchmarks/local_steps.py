"""Replicas that meet every H steps, on hosts with slow links: bytes and seconds per step, and what is learned in which time.

    sudo .venv/bin/python -m benchmarks.local_steps      # measures -> benchmarks/results/local_steps*.csv, docs/network.md
    python -m benchmarks.local_steps --draw              # tables and picture from the results that are there

Hosts, throttled links and the tiny recipe's model are those of benchmarks/network.py. Every method sees the same samples: one
micro-batch per step and host, and DDP with accumulation eight of them in one step.
"""

import argparse
import itertools
import statistics
from typing import Any

from benchmarks import network, network_tables, pages
from benchmarks.network import MICRO_BATCH, flags_for
from benchmarks.network_tables import two
from benchmarks.pages import RESULTS, Row
from testbed.cluster import Cluster
from testbed.needs import require
from testing.command_line import as_flags

SAMPLES = 3200  # that each method learns from: on two hosts 400 steps
EVALUATIONS, HELD_OUT = 8, 100
LEARNED_AT = "200mbit"  # the links' rate while it learns
TIMED_AT = ("1gbit", "50mbit")
EVERY = (5, 20, 50)
FRAGMENTS = 4


def local(every: int, **more: Any) -> list[str]:
    return as_flags(ds_config="none", sync_every=every, **more)


NESTEROV = {"outer_optim": "nesterov"}
# name -> accumulation, steps between two synchronisations, flags
METHODS: dict[str, tuple[int, int, list[str]]] = {
    "DDP": (1, 1, ["--ds_config", "none"]),
    "DDP, accumulation 8": (8, 1, ["--ds_config", "none"]),
    "DDP, PowerSGD": (1, 1, ["--ds_config", "none", "--ddp_comm_hook", "power_sgd"]),
    **{f"Local SGD, H = {every}": (1, every, local(every)) for every in EVERY},
    **{f"DiLoCo, H = {every}": (1, every, local(every, **NESTEROV)) for every in EVERY},
    "DiLoCo, H = 50, int8": (1, 50, local(50, sync_precision="int8", **NESTEROV)),
    "streaming, H = 20": (1, 20, local(20, sync_fragments=FRAGMENTS, **NESTEROV)),
}
BYTES = {"DDP, PowerSGD": None, "DiLoCo, H = 50, int8": 1 + 4 / 256}  # of a value on its way, where not 4


def jobs(hosts: int, methods: list[str], learn: bool) -> list[dict[str, Any]]:
    """Runs of train.py: timed at TIMED_AT, or learning at LEARNED_AT."""
    found = []
    for name in methods:
        accumulation, every, flags = METHODS[name]
        batch = MICRO_BATCH * hosts * accumulation
        rates: tuple[str, ...]
        if learn:
            rates, warm_up, measured = (LEARNED_AT,), 0, SAMPLES // batch - 1
            flags = [*flags, *as_flags(eval_steps=max(every, SAMPLES // batch // EVALUATIONS), eval_answers=0)]
        else:
            rates, warm_up, measured = (
                TIMED_AT,
                network.WARM_UP[accumulation],
                max(every, network.MEASURED[accumulation]),
            )
        steps = warm_up + len(rates) * (1 + measured)
        found.append(
            {
                "strategy": name,
                "accumulation": accumulation,
                "flags": [*flags_for(steps, batch, evaluated=HELD_OUT if learn else 8), *flags],
                "rates": rates,
                "warm_up": warm_up,
                "measured": measured,
            }
        )
    return found


def formula(name: str, hosts: int, parameters: int) -> float | None:
    """Bytes that leave a host per step: 2 (n - 1) / n values of each parameter, every H steps."""
    width = BYTES.get(name, 4)
    return width and 2 * (hosts - 1) / hosts * width * parameters / METHODS[name][1]


def timed(hosts: int, results: list[Row]) -> list[Row]:
    """One row per method and rate. Seconds are means over whole rounds: one step of them waits for the network."""
    return [
        {
            "hosts": hosts,
            "method": found["strategy"],
            "rate": rate,
            "step_seconds": round(statistics.fmean(block["seconds"]), 4),
            "kilobytes_sent": round(block["bytes"] / 1e3, 2),
            "kilobytes_formula": round((formula(found["strategy"], hosts, found["parameters"]) or 0) / 1e3, 2),
            "sequences": MICRO_BATCH * hosts * found["accumulation"],
        }
        for found in results
        for rate, block in zip(found["rates"], found["blocks"], strict=True)
    ]


def learned(hosts: int, results: list[Row]) -> list[Row]:
    """One row per method and evaluation: samples seen, training seconds until then without evaluations, held-out loss."""
    rows = []
    for found in results:
        seconds = [0.0, *found["blocks"][0]["seconds"]]  # the first step has no beginning: its end is second 0
        clock, paused = list(itertools.accumulate(seconds)), 0.0
        for step, loss, took in found["evaluations"]:
            at = max(0.0, clock[max(0, step - 1)] - paused)
            paused += took if step else 0.0  # the next step's interval holds it
            samples = step * MICRO_BATCH * hosts * found["accumulation"]
            rows.append(
                {
                    "hosts": hosts,
                    "method": found["strategy"],
                    "step": step,
                    "samples": samples,
                    "seconds": round(at, 2),
                    "held_out_loss": round(loss, 5),
                }
            )
    return rows


def measure() -> tuple[list[Row], list[Row]]:
    times, losses = [], []
    few = [
        "DDP",
        "DDP, accumulation 8",
        "DDP, PowerSGD",
        "Local SGD, H = 20",
        "DiLoCo, H = 5",
        "DiLoCo, H = 20",
        "streaming, H = 20",
    ]
    with Cluster(4) as cluster:
        for hosts, methods in ((2, list(METHODS)), (4, few)):
            network._say(f"{hosts} hosts, timed")
            times += timed(hosts, network.run(cluster, hosts, 1, jobs(hosts, methods, learn=False)))
            network._say(f"{hosts} hosts, learning at {LEARNED_AT}")
            losses += learned(hosts, network.run(cluster, hosts, 1, jobs(hosts, methods, learn=True)))
    return times, losses


# ---- tables ------------------------------------------------------------------------------------------------------
def tables() -> dict[str, str]:
    times, losses = pages.read(RESULTS / "local_steps.csv"), pages.read(RESULTS / "local_steps_losses.csv")
    worst = max(
        (abs(float(row["kilobytes_sent"]) / float(row["kilobytes_formula"]) - 1), row["method"], row["hosts"])
        for row in times
        if float(row["kilobytes_formula"])
    )
    said = f"Largest difference between what a host sent and the formula: {100 * worst[0]:.1f} % ({worst[1]}, {worst[2]} hosts)."
    measured = f"{said}\n\nMeasured on: {times[0]['machine']}; {times[0]['versions']}."
    return {f"local-steps-{hosts}": _table(times, losses, str(hosts)) for hosts in (2, 4)} | {
        "local-measured": measured
    }


def _table(times: list[Row], losses: list[Row], hosts: str) -> str:
    lines = []
    for method in dict.fromkeys(row["method"] for row in times if row["hosts"] == hosts):
        of = {row["rate"]: row for row in times if (row["hosts"], row["method"]) == (hosts, method)}
        curve = [row for row in losses if (row["hosts"], row["method"]) == (hosts, method)]
        accumulation = METHODS[method][0]
        steps = int(curve[-1]["step"])
        per_step = {
            **{rate: float(row["step_seconds"]) for rate, row in of.items()},
            LEARNED_AT: float(curve[-1]["seconds"]) / (steps - 1),
        }
        formula_ = float(of["1gbit"]["kilobytes_formula"]) / accumulation
        lines.append(
            [
                method,
                f"{float(of['1gbit']['kilobytes_sent']) / accumulation:,.0f}",
                f"{formula_:,.0f}" if formula_ else "-",
                *(f"{two(per_step[rate] / accumulation)} s" for rate in ("1gbit", LEARNED_AT, "50mbit")),
                f"{float(curve[-1]['held_out_loss']):.3f}",
                f"{float(curve[-1]['seconds']):,.0f} s",
            ]
        )
    rates = [network_tables.NAMES[rate] for rate in ("1gbit", LEARNED_AT, "50mbit")]
    head = [
        "method",
        "kB sent",
        "by formula",
        *rates,
        "held-out loss",
        f"trained in, {network_tables.NAMES[LEARNED_AT]}",
    ]
    return pages.markdown(head, lines)


def draw(losses: list[Row]) -> None:
    """Held-out loss over seconds of training at LEARNED_AT: two hosts and four."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    looks = {
        "DDP": ("#000000", "o"),
        "DDP, accumulation 8": ("#999999", "x"),
        "DDP, PowerSGD": ("#009E73", "D"),
        "Local SGD, H = 20": ("#56B4E9", "^"),
        "DiLoCo, H = 5": ("#E69F00", "s"),
        "DiLoCo, H = 20": ("#D55E00", "P"),
        "DiLoCo, H = 50": ("#CC79A7", "X"),
        "streaming, H = 20": ("#0072B2", "v"),
    }
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.6), sharey=True, layout="constrained")
    for axis, hosts in zip(axes, ("2", "4"), strict=True):
        for method, (colour, marker) in looks.items():
            curve = [row for row in losses if (row["hosts"], row["method"]) == (hosts, method)]
            x, y = ([float(row[key]) for row in curve] for key in ("seconds", "held_out_loss"))
            axis.plot(x, y, color=colour, marker=marker, markersize=5, label=method)
        axis.set_title(
            f"{hosts} hosts at {network_tables.NAMES[LEARNED_AT]}, {SAMPLES:,} sequences", loc="left", fontsize=11
        )
        axis.set_xlabel("seconds of training")
        axis.grid(color="#e5e5e5")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out loss")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(pages.DOCS / "local-training.png", dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--draw", action="store_true", help="measure nothing; tables and picture of the results that are there"
    )
    options = parser.parse_args()
    if not options.draw:
        require()
        times, losses = measure()
        where = pages.where()
        pages.save(RESULTS / "local_steps.csv", [row | where for row in times])
        pages.save(RESULTS / "local_steps_losses.csv", [row | where for row in losses])
    pages.write(network_tables.PAGE, tables())
    draw(pages.read(RESULTS / "local_steps_losses.csv"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
