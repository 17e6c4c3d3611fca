"""The tables of docs/evidence/network.md and its plot, from the results of benchmarks/network.py."""

import itertools
import math
import statistics
from pathlib import Path

from benchmarks.pages import EVIDENCE, RESULTS, Row, markdown, read
from benchmarks.published.traffic import traffic
from testbed.host import bits_per_second

PAGE = EVIDENCE / "network.md"
Case = tuple[int, int, str, int]  # hosts, ranks per host, strategy, accumulation
NAMES = {"10gbit": "10 Gbit/s", "1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s", "50mbit": "50 Mbit/s"}


def volume(kind: str, accumulation: int, hosts: int, per_host: int) -> float:
    """Elements per parameter that a host sends over its link in one step, in fp32 over gloo.

    kind: "hsdp" is two groups of half the ranks each
    """
    if kind == "hsdp":
        return (
            traffic("fsdp2", 1, hosts, per_host, accumulation, half=False, shard=hosts * per_host // 2, gloo=True).total
            / 4
        )
    return traffic(kind, 1, hosts, per_host, accumulation, half=False, gloo=True).total / 4


# ---- figures from rows -------------------------------------------------------------------------------------------
def cases(rows: list[Row]) -> dict[Case, list[Row]]:
    """Rows of one case, from the fastest network to the slowest."""
    found: dict[Case, list[Row]] = {}
    for row in rows:
        case = (int(row["hosts"]), int(row["ranks_per_host"]), row["strategy"], int(row["accumulation"]))
        found.setdefault(case, []).append(row)
    return {case: sorted(of, key=lambda row: -bits_per_second(row["rate"])) for case, of in found.items()}


def share(row: Row) -> float:
    """Percent of the step that is communication; a difference below what the machine's noise hides is none."""
    return max(0.0, float(row["communication_percent"]))


def seconds_on_the_link(row: Row) -> float:
    """What a step sends, at the link's full rate."""
    return 8e6 * float(row["megabytes_sent"]) / bits_per_second(row["rate"])


def half_by_rule(row: Row) -> float:
    """Mbit/s at which sending takes as long as the step without a network."""
    return 8 * float(row["megabytes_sent"]) / float(row["one_host_seconds"])


def half_measured(rows: list[Row]) -> str:
    """Mbit/s at which the share crosses one half, between the two nearest rates."""
    points = [(bits_per_second(row["rate"]) / 1e6, share(row)) for row in rows]
    if points[-1][1] < 50:
        return f"< {points[-1][0]:.0f}"
    if points[0][1] >= 50:
        return f"> {points[0][0]:.0f}"
    (fast, low), (slow, high) = next((a, b) for a, b in itertools.pairwise(points) if b[1] >= 50)
    return two(math.exp(math.log(fast) + (50 - low) / (high - low) * math.log(slow / fast)))


def speed(row: Row) -> float:
    """Sequences per second."""
    return int(row["sequences"]) / float(row["step_seconds"])


def two(number: float) -> str:
    """Two significant digits."""
    digits = 1 - math.floor(math.log10(abs(number))) if number else 0
    return f"{round(number, digits):,.{max(0, digits)}f}"


def link_use(rows: list[Row], rate: str) -> float:
    """Percent of the rate that the additional seconds of a step have carried, median over all cases."""
    used = [
        100 * seconds_on_the_link(row) / (float(row["step_seconds"]) - float(row["one_host_seconds"]))
        for row in rows
        if row["rate"] == rate and share(row) > 30
    ]
    return statistics.median(used)


# ---- tables ------------------------------------------------------------------------------------------------------
def table(rows: list[Row]) -> str:
    """Seconds per step and share of communication, at each rate."""
    rates = sorted({row["rate"] for row in rows}, key=bits_per_second, reverse=True)
    lines = []
    for (_, _, strategy, k), of in cases(rows).items():
        at = {row["rate"]: f"{two(float(row['step_seconds']))} s, {share(row):.0f} %" for row in of}
        lines.append(
            [
                strategy,
                str(k),
                f"{float(of[0]['megabytes_sent']):.1f}",
                f"{float(of[0]['megabytes_formula']):.1f}",
                f"{two(float(of[0]['one_host_seconds']))} s",
                *(at[rate] for rate in rates),
            ]
        )
    head = ["strategy", "accumulation", "MB sent", "by formula", "one host", *(NAMES.get(rate, rate) for rate in rates)]
    return markdown(head, lines)


def halves(rows: list[Row]) -> str:
    """Below which rate communication is more than half of the step."""
    lines = [
        [strategy, str(k), two(half_by_rule(of[0])), half_measured(of)]
        for (_, _, strategy, k), of in cases(rows).items()
    ]
    return markdown(["strategy", "accumulation", "by the rule, Mbit/s", "measured, Mbit/s"], lines)


def gains(rows: list[Row]) -> str:
    """Sequences per second against DDP with accumulation 1 at the same rate."""
    found = cases(rows)
    plain = next(of for (_, _, strategy, k), of in found.items() if (strategy, k) == ("DDP", 1))
    lines = []
    for (_, _, strategy, k), of in found.items():
        lines.append(
            [strategy, str(k), *(f"{speed(row) / speed(base):.2f}x" for row, base in zip(of, plain, strict=True))]
        )
    return markdown(["strategy", "accumulation", *(NAMES[row["rate"]] for row in plain)], lines)


def loss_table(rows: list[Row]) -> str:
    names = {"none": "fp32", "bf16": "bf16", "fp16": "fp16", "power_sgd": "PowerSGD"}
    lines = [
        [
            names[row["ddp_comm_hook"]],
            f"{float(row['held_out_loss_before']):.3f}",
            f"{float(row['held_out_loss']):.3f}",
            f"{two(float(row['step_seconds']))} s",
        ]
        for row in rows
    ]
    return markdown(["gradients sent as", "loss before", f"after {rows[0]['steps']} steps", "step on one host"], lines)


# ---- the page ----------------------------------------------------------------------------------------------------
# Okabe and Ito's colours are told apart by colour-blind readers; markers say the same in print.
LOOKS = {"DDP": ("#000000", "o"), "DDP, fp16 gradients": ("#E69F00", "s"), "DDP, PowerSGD": ("#009E73", "D"),
         "ZeRO-1": ("#56B4E9", "^"), "ZeRO-2": ("#0072B2", "v"), "ZeRO-3": ("#D55E00", "P"),
         "HSDP": ("#CC79A7", "X")}  # fmt: skip


def is_noise(of: list[Row], row: Row) -> bool:
    """Whether a share is larger than on a slower link, which no faster link can cause."""
    return any(
        share(other) < share(row) for other in of if bits_per_second(other["rate"]) < bits_per_second(row["rate"])
    )


def shares(row: Row) -> tuple[float, float]:
    """The least and the largest share of communication of a row's steps, in percent."""
    alone, steps = float(row["one_host_seconds"]), (float(row["fastest_step"]), float(row["slowest_step"]))
    least, most = (max(0.0, 100 * (1 - alone / seconds)) for seconds in steps)
    return least, most


def draw(rows: list[Row], path: Path) -> None:
    """Share of communication over the rate: two hosts with one micro-batch per step, with eight, and two hosts of two ranks.

    A thin bar reaches from the fastest step of a row to the slowest, where several were timed. A hollow mark is noise.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = (
        ("2 hosts of 1 rank, accumulation 1", lambda case: case[:2] == (2, 1) and case[3] == 1),
        ("2 hosts of 1 rank, accumulation 8", lambda case: case[:2] == (2, 1) and case[3] == 8),
        ("2 hosts of 2 ranks (dashed: accumulation 8)", lambda case: case[:2] == (2, 2)),
    )
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), sharey=True, layout="constrained")
    for axis, (title, belongs) in zip(axes, panels, strict=True):
        axis.axhline(50, color="#999999", linewidth=1, zorder=1)
        for case, of in cases(rows).items():
            if not belongs(case) or case[2] not in LOOKS:
                continue
            colour, marker = LOOKS[case[2]]
            dashed = "--" if "dashed" in title and case[3] == 8 else "-"
            for noise, line in ((False, dashed), (True, "")):
                those = [row for row in of if is_noise(of, row) == noise]
                x = [bits_per_second(row["rate"]) / 1e6 for row in those]
                look = {
                    "color": colour,
                    "marker": marker,
                    "markersize": 6,
                    "markerfacecolor": "#ffffff" if noise else colour,
                }
                axis.plot(x, [share(row) for row in those], line, zorder=2, **look)
                axis.vlines(x, *zip(*map(shares, those), strict=True), color=colour, linewidth=1) if those else None
        axis.set_xscale("log")
        axis.set_xticks([50, 200, 1000, 10000], ["50", "200", "1,000", "10,000"])
        axis.minorticks_off()
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("rate of each host's link, Mbit/s")
        axis.grid(color="#e5e5e5", zorder=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].annotate("half of the step", (12000, 51), ha="right", fontsize=9, color="#666666")
    axes[0].set_ylim(-3, 102)
    axes[0].set_ylabel("communication, percent of the step")
    handles = [plt.Line2D([], [], color=colour, marker=marker) for colour, marker in LOOKS.values()]
    figure.legend(handles, list(LOOKS), loc="outside upper center", ncols=len(LOOKS), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def tables() -> dict[str, str]:
    rows, learned = read(RESULTS / "network.csv"), read(RESULTS / "network_losses.csv")
    pairs, fours, wide = (
        [row for row in rows if (row["hosts"], row["ranks_per_host"]) == shape]
        for shape in (("2", "1"), ("2", "2"), ("4", "1"))
    )
    worst, of = max(
        (abs(float(row["megabytes_sent"]) / float(row["megabytes_formula"]) - 1), row["strategy"]) for row in rows
    )
    measured = (
        f"Largest difference between sent and formula: {100 * worst:.0f} % ({of}). At 50 Mbit/s links carried "
        f"{link_use(rows, '50mbit'):.0f} % of their rate (median).\n\nMeasured on: {rows[0]['machine']}; {rows[0]['versions']}."
    )
    return {
        "halves": halves(pairs),
        "gains": gains(pairs),
        "losses": loss_table(learned),
        "two-hosts": table(pairs),
        "two-hosts-of-two": table(fours),
        "four-hosts": table(wide),
        "measured": measured,
    }
