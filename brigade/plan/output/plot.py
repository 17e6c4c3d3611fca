"""Draw a plan: memory by part for every strategy, and speed over node counts. Only this module imports matplotlib."""

from dataclasses import replace
from pathlib import Path

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ...errors import UserError
from ...errors.console import billions, counted
from ...errors.tables import Fields
from ...train.host import files
from ...train.recipe.method import METHODS
from ..choice.search import candidates, chosen
from ..choice.workload import Candidate, Cluster, Workload
from ..costs.estimate import factors, memory_group, time_group
from ..costs.memory import GIB
from .show import recomputes, shown_first

SUFFIXES = (".png", ".svg")
MOST_NODES = 64
BARS = 10  # strategies whose memory is drawn
LINES = 7  # strategies whose speed is drawn: more cannot be told apart
# Okabe and Ito's colours are told apart by colour-blind readers; markers say the same in print.
PARTS = {"weights": "#0072B2", "gradients": "#E69F00", "optimizer": "#009E73", "activations": "#CC79A7", "logits": "#F0E442",
         "buffers": "#56B4E9", "context, reserve": "#999999"}  # fmt: skip
LOOKS = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "D"), ("#CC79A7", "^"), ("#E69F00", "v"), ("#56B4E9", "P"),
         ("#777777", "X"))  # fmt: skip
INK, QUIET = "#1c1d21", "#696b74"  # as in STYLE
STYLE = Path(__file__).with_name("plan.mplstyle")


# ---- what is drawn -----------------------------------------------------------------------------------------------
Lines = dict[str, dict[int, float]]  # strategy -> nodes -> tokens per second of all GPUs, by its best configuration


def parts(candidate: Candidate) -> dict[str, float]:
    """Return the GiB of each GPU by part; they add up to what the card has to hold.

    "context, reserve": CUDA's context, NCCL's buffers, gaps and the pools of ZeRO-3's streams
    """
    result = candidate.estimate
    inside = {name: value / GIB for name, value in vars(result.memory).items()}
    return inside | {"context, reserve": result.device_gib - result.allocated_gib}


def curves(workload: Workload, cluster: Cluster, ranked: list[Candidate]) -> Lines:
    """Return the points of the strategies that fit on some number of nodes, best first.

    The global batch stays: more nodes than it has sequences for, or that it does not divide over, are left out.
    """
    counts = {2**power for power in range(MOST_NODES.bit_length())} | {cluster.nodes}
    found: Lines = {candidate.label: {} for candidate in ranked}
    for nodes in sorted(counts):
        if workload.batch % (nodes * cluster.node_size):
            continue
        larger = replace(cluster, nodes=nodes)
        for candidate in ranked if nodes == cluster.nodes else candidates(workload, larger):
            if candidate.fits:
                speed = candidate.estimate.tokens_per_second_per_gpu * larger.gpus
                found.setdefault(candidate.label, {})[nodes] = speed
    return {name: points for name, points in found.items() if points}


def bars(ranked: list[Candidate], winner: Candidate | None) -> list[Candidate]:
    """Return the chosen candidate, the best of the others, and the best that does not fit."""
    most = shown_first(ranked, winner)
    shown, rest = most[:BARS], most[BARS:]
    unfit = next((candidate for candidate in rest if not candidate.fits), None)
    return [*shown[:-1], unfit] if unfit and all(candidate.fits for candidate in shown) else shown


# ---- drawing -----------------------------------------------------------------------------------------------------
def check(path: Path) -> None:
    """Raise UserError for a path that is no new .png or .svg."""
    if path.suffix not in SUFFIXES:
        problem = f"{path} ends neither in .png nor in .svg"
        raise UserError("flag --plot", problem, "name the file plan.png or plan.svg")
    if path.exists():
        raise UserError("flag --plot", f"{path} exists already", "name another file, or remove that one")
    if not path.parent.is_dir():
        raise UserError("flag --plot", f"there is no folder {path.parent}", "make it, or name a file in another one")


def write(path: Path, workload: Workload, cluster: Cluster, ranked: list[Candidate]) -> None:
    """Draw `ranked`, of search.candidates(workload, cluster), into a new .png or .svg. Raises UserError for any other path."""
    check(path)
    with matplotlib.style.context(STYLE):
        picture = Picture(workload, cluster, ranked)
        with files.replacing(path) as file:
            picture.figure.savefig(file, format=path.suffix[1:], dpi=130)


class Picture:
    """A plan drawn."""

    def __init__(self, workload: Workload, cluster: Cluster, ranked: list[Candidate]) -> None:
        self.cluster, self.ranked, self.winner = cluster, ranked, chosen(ranked)
        self.lines = curves(workload, cluster, ranked)
        between = f", {cluster.link} between nodes" if cluster.link else ""
        heading = (
            f"{workload.shape.name}, {billions(workload.shape.parameters)} parameters: {METHODS[workload.method].title}",
            f"{workload.batch} sequences of {workload.sequence:,} tokens per step, "
            f"{counted(cluster.nodes, 'node')} of {cluster.node_size} x {cluster.gpu}{between}",
        )
        best = ranked[0].estimate
        memory, seconds = factors("memory", memory_group(best.job)), factors("time", time_group(best.job, best.gpu))
        accuracy = (
            f"By formula, not measured. 80 % intervals: torch allocates {memory[0]:g} to {memory[1]:g} times as much, "
            f"a step takes {seconds[0]:g} to {seconds[1]:g} times as long."
        )
        self.figure = Figure(figsize=(14, max(6.2, 2.2 + 0.52 * len(bars(ranked, self.winner)))), layout="constrained")
        self.figure.suptitle("\n".join(heading), x=0.01, ha="left", fontsize=12)
        self.figure.supxlabel(accuracy, x=0.01, ha="left", fontsize=9, color=QUIET)
        grid = self.figure.add_gridspec(2, 2, width_ratios=(1.15, 1))
        self.draw_memory(self.figure.add_subplot(grid[:, 0]))
        self.draw_speed(self.figure.add_subplot(grid[0, 1]), self.figure.add_subplot(grid[1, 1]))

    def draw_memory(self, axis: Axes) -> None:
        """Draw one bar per strategy, the chosen one on top; a bar far beyond the card is cut and says how far it would go."""
        ranked, card = bars(self.ranked, self.winner), self.ranked[0].estimate.gpu.memory_gib
        end = min(1.12 * max(card, *(candidate.estimate.device_gib for candidate in ranked)), 1.75 * card)
        names, places, left = [candidate.label for candidate in ranked], range(len(ranked)), [0.0] * len(ranked)
        for part, colour in PARTS.items():
            sizes = [parts(candidate)[part] for candidate in ranked]
            for place, bar in enumerate(axis.barh(places, sizes, 0.66, left, color=colour, label=part)):
                bar.set_alpha(1 if ranked[place].fits else 0.4)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
        white = {"boxstyle": "round,pad=0.2", "facecolor": "#ffffff", "edgecolor": "none"}
        for place, candidate in enumerate(ranked):  # a label stays within the panel, and legible on whatever it crosses
            inside = left[place] > 0.8 * end
            beside = (
                max(left[place], card) if candidate.fits else left[place]
            )  # right of both lines, which it would cross
            lacks = "" if candidate.fits else ", host too small" if candidate.refused else ", does not fit"
            said, at = f"{left[place]:,.0f} GiB{lacks}", (min(beside, end), place)
            offset, side = ((-7, 0), "right") if inside else ((7, 0), "left")
            axis.annotate(said, at, offset, textcoords="offset points", va="center", ha=side, fontsize=9, bbox=white)
        usable = (1 - ranked[0].margin) * card
        for x, text, side, dashes in (
            (card, f" card {card:.0f}", "left", "-"),
            (usable, f"usable {usable:.0f} ", "right", "--"),
        ):
            axis.axvline(x, color=INK, linewidth=1.2, linestyle=dashes)
            axis.text(x, 1.01, text, transform=axis.get_xaxis_transform(), ha=side, va="bottom", fontsize=9)
        jobs = [candidate.estimate.job for candidate in ranked]
        again = [", recomputes" if recomputes(job) == "layers" else "" for job in jobs]
        labels = [f"{names[place]}\nmicro-batch {jobs[place].micro_batch}{again[place]}" for place in places]
        axis.set_yticks(places, labels)
        if self.winner:
            axis.get_yticklabels()[ranked.index(self.winner)].set_fontweight("bold")
        axis.set(xlim=(0, end), ylim=(len(ranked) - 0.4, -0.6), xlabel="GiB")
        axis.set_title("Memory of each GPU", pad=18)
        axis.grid(axis="x")
        axis.legend(loc="upper center", bbox_to_anchor=(0.45, -0.09), ncols=4)

    def draw_speed(self, total: Axes, each: Axes) -> None:
        """Draw tokens per second over node counts, of all GPUs and of one; the chosen strategy's line is the thick one."""
        total.set_title("Tokens per second, all GPUs")
        each.set_title("Tokens per second and GPU")
        if not self.lines:
            for axis in (total, each):
                axis.set_axis_off()
                axis.text(0.5, 0.5, f"nothing fits on up to {MOST_NODES} nodes", transform=axis.transAxes, ha="center")
            return
        size, best = self.cluster.node_size, self.winner.label if self.winner else ""
        shown = list(self.lines)[:LINES]
        if best and best not in shown:
            shown[-1] = best
        counts = sorted({nodes for name in shown for nodes in self.lines[name]})
        smallest = [min(points.items()) for points in self.lines.values()]  # (nodes, speed)
        start, speed = max(smallest, key=lambda point: (point[0] == counts[0], point[1]))
        ideal = speed / start / size
        quiet: Fields = {"color": QUIET, "linewidth": 0.9}
        total.plot(
            counts, [ideal * nodes * size for nodes in counts], label=f"ideal, from {counted(start, 'node')}", **quiet
        )
        each.axhline(ideal, **quiet)
        highest = ideal
        for index, name in enumerate(shown):
            (colour, marker), points = LOOKS[index], self.lines[name]
            per_gpu = {nodes: speed / nodes / size for nodes, speed in points.items()}
            highest = max(highest, *per_gpu.values())
            label, width = (f"{name}, chosen", 2.8) if name == best else (name, 1.4)
            for axis, heights in ((total, points), (each, per_gpu)):
                look: Fields = {"color": colour, "marker": marker}
                axis.plot(list(heights), list(heights.values()), linewidth=width, label=label, **look)
        total.set_yscale("log")
        total.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
        for axis in (total, each):
            axis.set_xscale("log", base=2)
            axis.set_xticks(counts, [str(count) for count in counts])
            axis.set_xlim(counts[0] / 1.2, counts[-1] * 1.2)
            axis.axvline(self.cluster.nodes, linestyle=":", **quiet)
            axis.minorticks_off()
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:g} M")
            axis.grid(axis="y")
        each.set_ylim(0, 1.12 * highest)
        each.set_xlabel(f"nodes of {counted(size, 'GPU')}, same global batch (dotted: as planned)")
        total.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
