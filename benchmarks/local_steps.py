"""Replicas that meet every H steps, on real hosts: what crosses a host's link, and what is learned from the same samples.

    sudo .venv/bin/python -m benchmarks.local_steps     # measures -> benchmarks/results/local_steps_*.csv, docs/network.md
    python -m benchmarks.local_steps --draw             # tables and picture from the results that are there

Hosts, links and the tiny recipe's model are those of benchmarks/network.py. Every method sees the same samples: one micro-batch
per step and host, and DDP with accumulation eight of them in one step. Neither figure depends on how busy the machine is.
"""

import argparse
from typing import Any

from benchmarks import network, network_tables, pages
from benchmarks.network import MICRO_BATCH, flags_for
from benchmarks.network_tables import two
from benchmarks.pages import RESULTS, Row
from testbed.cluster import Cluster
from testbed.needs import require
from testing.command_line import as_flags

SAMPLES = 1600  # that each method learns from: on two hosts 200 steps
EVALUATIONS, HELD_OUT = 8, 100
COUNTED_AT = "1gbit"  # the links' rate; on slower ones TCP sends a part of the bytes twice
RATES = {"1 Gbit/s": 1e9, "200 Mbit/s": 2e8, "50 Mbit/s": 5e7}
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
    """Runs of train.py: whole rounds whose bytes are counted, or all SAMPLES."""
    found = []
    for name in methods:
        accumulation, every, flags = METHODS[name]
        batch = MICRO_BATCH * hosts * accumulation
        rates: tuple[str | None, ...]
        if learn:
            rates, warm_up, measured = (None,), 0, SAMPLES // batch - 1
            flags = [*flags, *as_flags(eval_steps=max(every, SAMPLES // batch // EVALUATIONS), eval_answers=0)]
        else:
            rates, warm_up, measured = (
                (COUNTED_AT,),
                network.WARM_UP[accumulation],
                max(every, network.MEASURED[accumulation]),
            )
        steps = (
            warm_up + len(rates) * (1 + measured) + (0 if learn else every)
        )  # the last round's fragments go together
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


def counted(hosts: int, results: list[Row]) -> list[Row]:
    """One row per method."""
    return [
        {
            "hosts": hosts,
            "method": found["strategy"],
            "kilobytes_sent": round(found["blocks"][0]["bytes"] / 1e3, 2),
            "kilobytes_formula": round((formula(found["strategy"], hosts, found["parameters"]) or 0) / 1e3, 2),
        }
        for found in results
    ]


def learned(hosts: int, results: list[Row]) -> list[Row]:
    """One row per method and evaluation."""
    return [
        {
            "hosts": hosts,
            "method": found["strategy"],
            "step": step,
            "samples": step * MICRO_BATCH * hosts * found["accumulation"],
            "held_out_loss": round(loss, 5),
        }
        for found in results
        for step, loss in found["evaluations"]
    ]


FEW = (
    "DDP",
    "DDP, accumulation 8",
    "DDP, PowerSGD",
    "Local SGD, H = 20",
    "DiLoCo, H = 5",
    "DiLoCo, H = 20",
    "streaming, H = 20",
)
PLAN = ((2, list(METHODS)), (4, list(FEW)))  # hosts, methods


def measure(learn: bool) -> list[Row]:
    rows = []
    with Cluster(4) as cluster:
        for hosts, methods in PLAN:
            network._say(f"{hosts} hosts, {'losses' if learn else 'bytes'}")
            results = network.run(cluster, hosts, 1, jobs(hosts, methods, learn))
            rows += (learned if learn else counted)(hosts, results)
    return rows


FILES = {"bytes": "local_steps_bytes.csv", "losses": "local_steps_losses.csv"}


# ---- tables ------------------------------------------------------------------------------------------------------
def tables() -> dict[str, str]:
    sent, losses = (pages.read(RESULTS / name) for name in FILES.values())
    worst = max(
        (abs(float(row["kilobytes_sent"]) / float(row["kilobytes_formula"]) - 1), row["method"], row["hosts"])
        for row in sent
        if float(row["kilobytes_formula"])
    )
    said = f"Largest difference between what a host sent and the formula: {100 * worst[0]:.1f} % ({worst[1]}, {worst[2]} hosts)."
    measured = f"{said}\n\nMeasured on: {sent[0]['machine']}; {sent[0]['versions']}."
    return {f"local-steps-{hosts}": _table(sent, losses, str(hosts)) for hosts in (2, 4)} | {"local-measured": measured}


def _table(sent: list[Row], losses: list[Row], hosts: str) -> str:
    """Bytes and seconds are for one micro-batch per host, so that accumulation compares."""
    lines = []
    for row in (row for row in sent if row["hosts"] == hosts):
        method, k = row["method"], METHODS[row["method"]][0]
        loss = next(each for each in reversed(losses) if (each["hosts"], each["method"]) == (hosts, method))
        kilobytes, by_formula = float(row["kilobytes_sent"]) / k, float(row["kilobytes_formula"]) / k
        seconds = (f"{two(8e3 * kilobytes / rate)} s" for rate in RATES.values())
        formula_ = f"{by_formula:,.0f}" if by_formula else "-"
        lines.append([method, f"{kilobytes:,.0f}", formula_, *seconds, f"{float(loss['held_out_loss']):.3f}"])
    return pages.markdown(["method", "kB sent", "by formula", *RATES, "held-out loss"], lines)


def draw(sent: list[Row], losses: list[Row]) -> None:
    """Held-out loss over what a host has sent until then: two hosts and four."""
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
        for row in (row for row in sent if row["hosts"] == hosts and row["method"] in looks):
            colour, marker = looks[row["method"]]
            curve = [
                each
                for each in losses
                if (each["hosts"], each["method"]) == (hosts, row["method"]) and int(each["step"])
            ]
            x = [int(each["step"]) * float(row["kilobytes_sent"]) / 1e3 for each in curve]
            y = [float(each["held_out_loss"]) for each in curve]
            axis.plot(x, y, color=colour, marker=marker, markersize=5, label=row["method"])
        axis.set_xscale("log")
        axis.set_title(f"{hosts} hosts, {SAMPLES:,} sequences", loc="left", fontsize=11)
        axis.set_xlabel("MB that a host has sent")
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
    parser.add_argument("--only", choices=FILES, help="measure that alone, and write no page")
    options = parser.parse_args()
    if not options.draw:
        require()
        where = pages.where()
        for what, name in FILES.items():
            if options.only in (None, what):
                pages.save(RESULTS / name, [row | where for row in measure(learn=what == "losses")])
    if options.only is None:
        pages.write(network_tables.PAGE, tables())
        draw(*(pages.read(RESULTS / name) for name in FILES.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
