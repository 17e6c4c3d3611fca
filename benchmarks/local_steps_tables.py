"""The tables and pictures of docs/evidence/local-training.md that benchmarks/local_steps.py measures."""

from pathlib import Path

from benchmarks import pages
from benchmarks.network_tables import NAMES, two
from benchmarks.pages import EVIDENCE, RESULTS, Row

PAGE = EVIDENCE / "local-training.md"
FILES = {name: f"local_steps_{name}.csv" for name in ("times", "losses", "clock")}
RATES = ("1gbit", "200mbit", "50mbit")
COUNTED = RATES[0]  # the rate at which bytes are counted; on slower links TCP sends a part of them twice
REAL, PLACED = "200mbit", "50mbit"  # of the picture over time

# What is drawn. Okabe and Ito's colours are told apart by colour-blind readers; markers say the same in print.
LOOKS = {
    "DDP": ("#000000", "o"),
    "DDP, accumulation 8": ("#999999", "x"),
    "DDP, PowerSGD": ("#009E73", "D"),
    "Local SGD, H = 20": ("#56B4E9", "^"),
    "DiLoCo, H = 5": ("#E69F00", "s"),
    "DiLoCo, H = 20": ("#D55E00", "P"),
    "DiLoCo, H = 50": ("#CC79A7", "X"),
    "streaming, H = 20": ("#0072B2", "v"),
}
Times = dict[tuple[str, str, str], Row]  # by hosts, method, rate
Curves = dict[str, tuple[list[float], list[float]]]  # by method: x, held-out losses


def timed_as(method: str) -> str:
    """With the same H, Local SGD and DiLoCo send the same and step the same: one of them is timed."""
    return method.replace("Local SGD", "DiLoCo")


def _times() -> Times:
    return {(row["hosts"], row["method"], row["rate"]): row for row in pages.read(RESULTS / FILES["times"])}


def _by_method(rows: list[Row], hosts: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["hosts"] == hosts:
            found.setdefault(row["method"], []).append(row)
    return found


# ---- tables ------------------------------------------------------------------------------------------------------
def tables() -> dict[str, str]:
    times, losses = _times(), pages.read(RESULTS / FILES["losses"])
    counted = [row for row in times.values() if row["rate"] == COUNTED]
    worst = max(
        (abs(float(row["kilobytes_sent"]) / float(row["kilobytes_formula"]) - 1), row["method"], row["hosts"])
        for row in counted
        if float(row["kilobytes_formula"])
    )
    said = f"Largest difference between what a host sent and the formula: {100 * worst[0]:.1f} % ({worst[1]}, {worst[2]} hosts)."
    measured = f"{said}\n\nMeasured on: {counted[0]['machine']}; {counted[0]['versions']}."
    found = {f"local-steps-{hosts}": _table(times, _by_method(losses, hosts), hosts) for hosts in ("2", "4")}
    return found | {"local-measured": measured}


def _table(times: Times, losses: dict[str, list[Row]], hosts: str) -> str:
    """Bytes and seconds are for one micro-batch per host, so that accumulation compares."""
    lines = []
    for method, of in losses.items():
        at = [times[hosts, timed_as(method), rate] for rate in RATES]
        k = int(at[0]["accumulation"])
        sent, by_formula = (float(at[0][key]) / k for key in ("kilobytes_sent", "kilobytes_formula"))
        seconds = (f"{two(float(row['step_seconds']) / k)} s" for row in at)
        formula = f"{by_formula:,.0f}" if by_formula else "-"
        lines.append([method, f"{sent:,.0f}", formula, *seconds, f"{float(of[-1]['held_out_loss']):.3f}"])
    return pages.markdown(["method", "kB sent", "by formula", *(NAMES[rate] for rate in RATES), "held-out loss"], lines)


# ---- pictures ----------------------------------------------------------------------------------------------------
def draw() -> None:
    """Held-out loss over what a host has sent until then, two hosts and four; and over time, two hosts at two rates."""
    times, losses, clock = _times(), pages.read(RESULTS / FILES["losses"]), pages.read(RESULTS / FILES["clock"])

    def over(rows: list[Row], hosts: str, rate: str, column: str, scale: float = 1) -> Curves:
        each = {method: float(row[column]) for (of, method, at), row in times.items() if (of, at) == (hosts, rate)}
        return {
            method: _curve(of, [scale * x for x in until(of, each[timed_as(method)], each["DDP"])])
            for method, of in _by_method(rows, hosts).items()
        }

    panels = {f"{hosts} hosts": over(losses, hosts, COUNTED, "kilobytes_sent", 1e-3) for hosts in ("2", "4")}
    _picture(EVIDENCE / "local-training.png", "MB that a host has sent", panels)
    real = {method: _curve(of, [float(row["seconds"]) for row in of]) for method, of in _by_method(clock, "2").items()}
    placed = over(clock, "2", PLACED, "step_seconds")
    panels = {
        f"{NAMES[REAL]}: as timed": real,
        f"{NAMES[PLACED]}: the same losses, at measured seconds per step": placed,
    }
    _picture(EVIDENCE / "local-training-time.png", "seconds of training on 2 hosts", panels)


def until(rows: list[Row], each: float, whole: float) -> list[float]:
    """What a method takes up to each of its evaluations, if a step takes `each`.

    whole: what a step of DDP takes. PowerSGD's first tenth of all steps is plain DDP (brigade/train/engines/ddp_engine.py)
    """
    steps = [int(row["step"]) for row in rows]
    plain = round(steps[-1] / 10) if "PowerSGD" in rows[0]["method"] else 0
    return [each * step + (whole - each) * min(step, plain) for step in steps]


def _curve(rows: list[Row], x: list[float]) -> tuple[list[float], list[float]]:
    """Without what was before the first step, which a logarithmic axis does not have."""
    return x[1:], [float(row["held_out_loss"]) for row in rows[1:]]


def _picture(path: Path, label: str, panels: dict[str, Curves]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.6), sharey=True, layout="constrained")
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for method, (colour, marker) in LOOKS.items():
            if method in curves:
                axis.plot(*curves[method], color=colour, marker=marker, markersize=5, label=method)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel(label)
        axis.grid(color="#e5e5e5")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out loss")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
