"""Pictures of a plan: memory by part for every strategy, and speed over node counts. The one module that imports matplotlib."""

import html
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from ...errors import UserError
from ...errors.console import billions, counted
from ...recipe.method import METHODS
from ..choice.estimate import intervals, of_time
from ..choice.job import Job
from ..choice.search import Candidate, Cluster, Workload, candidates, chosen
from ..costs.memory import GIB

SUFFIXES = (".png", ".html")
MOST_NODES = 64
LINES = 7  # strategies whose speed is drawn: more cannot be told apart
# Okabe and Ito's colours are told apart by colour-blind readers; markers say the same in print.
PARTS = {
    "weights": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#CC79A7",
    "logits": "#F0E442",
    "buffers": "#56B4E9",
    "context, reserve": "#999999",
}
LOOKS = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "D"),
    ("#CC79A7", "^"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#777777", "X"),
)
INK, QUIET, GRID = "#1c1d21", "#696b74", "#dcdde2"  # in HTML the page's own, light or dark


# ---- what is drawn -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Point:
    """A strategy's best configuration on `nodes` nodes. Tokens per second of all GPUs."""

    nodes: int
    gpus: int
    speed: float

    @property
    def per_gpu(self) -> float:
        return self.speed / self.gpus


def parts(candidate: Candidate) -> dict[str, float]:
    """GiB of each GPU; they add up to what nvidia-smi shows.

    "context, reserve": CUDA's context, NCCL's buffers, and what torch's allocator holds unused
    """
    result = candidate.estimate
    inside = {part.name: getattr(result.memory, part.name) / GIB for part in fields(result.memory)}
    return inside | {"context, reserve": result.device_gib - result.allocated_gib}


def curves(workload: Workload, cluster: Cluster, ranked: list[Candidate]) -> dict[str, list[Point]]:
    """Strategy -> points, of those that fit on some number of nodes, best first.

    The global batch stays: more nodes than it has sequences for, or that it does not divide over, are left out.
    """
    counts = {2**power for power in range(MOST_NODES.bit_length())} | {cluster.nodes}
    found: dict[str, list[Point]] = {candidate.choice.name: [] for candidate in ranked}
    for nodes in sorted(counts):
        if workload.batch % (nodes * cluster.node_size):
            continue
        larger = replace(cluster, nodes=nodes)
        for candidate in ranked if nodes == cluster.nodes else candidates(workload, larger):
            if candidate.fits:
                speed = candidate.estimate.tokens_per_second_per_gpu * larger.gpus
                found.setdefault(candidate.choice.name, []).append(Point(nodes, larger.gpus, speed))
    return {name: points for name, points in found.items() if points}


# ---- drawing -----------------------------------------------------------------------------------------------------
def check(path: Path) -> None:
    """Raises UserError where no picture can be written."""
    if path.suffix not in SUFFIXES:
        raise UserError(
            "flag --plot", f"{path} ends neither in .png nor in .html", "name the file plan.png or plan.html"
        )
    if path.exists():
        raise UserError("flag --plot", f"{path} exists already", "name another file, or remove that one")
    if not path.parent.is_dir():
        raise UserError("flag --plot", f"there is no folder {path.parent}", "make it, or name a file in another one")


def write(path: Path, workload: Workload, cluster: Cluster, ranked: list[Candidate]) -> None:
    """Draw `ranked`, of search.candidates(workload, cluster), into a new .png or .html. Raises UserError for any other path."""
    check(path)
    lines, winner = curves(workload, cluster, ranked), chosen(ranked)
    figure, hints = _figure(workload, cluster, ranked, lines, winner)
    if path.suffix == ".png":
        figure.savefig(path, dpi=130)
        return
    path.write_text(_page(figure, hints, _heading(workload, cluster), ranked, lines, winner))


def _heading(workload: Workload, cluster: Cluster) -> tuple[str, str]:
    """(model and method, batch and cluster)"""
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} of {cluster.node_size} x {cluster.gpu}"
    return (
        f"{workload.shape.name}, {billions(workload.shape.parameters)} parameters: {METHODS[workload.method].title}",
        f"{workload.batch} sequences of {workload.length:,} tokens per step, {nodes}"
        + (f", {cluster.link} between nodes" if cluster.link else ""),
    )


def _accuracy(job: Job) -> str:
    memory, seconds = intervals()["memory"], intervals()[of_time(job)]
    return (
        f"By formula, not measured. In four runs of five torch allocates {memory[0]:g} to {memory[1]:g} times as much, and a "
        f"step takes {seconds[0]:g} to {seconds[1]:g} times as long."
    )


def _figure(
    workload: Workload,
    cluster: Cluster,
    ranked: list[Candidate],
    lines: dict[str, list[Point]],
    winner: Candidate | None,
) -> tuple[Figure, dict[str, str]]:
    """The picture, and what a pointer over each of its elements is told."""
    hints: dict[str, str] = {}
    style = {
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": QUIET,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.titlesize": 11,
        "svg.fonttype": "none",
        "font.family": "DejaVu Sans",
        "svg.hashsalt": "plan",
    }
    with matplotlib.rc_context(style):  # type: ignore[arg-type]
        figure = Figure(figsize=(14, max(6.2, 2.2 + 0.52 * len(ranked))), layout="constrained")
        title, under = _heading(workload, cluster)
        figure.suptitle(f"{title}\n{under}", x=0.01, ha="left", fontsize=12)
        figure.supxlabel(_accuracy(ranked[0].estimate.job), x=0.01, ha="left", fontsize=9, color=QUIET)
        grid = figure.add_gridspec(2, 2, width_ratios=(1.15, 1))
        _draw_memory(figure.add_subplot(grid[:, 0]), ranked, winner, hints)
        total, each = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
        _draw_speed(total, each, cluster, lines, winner, hints)
        figure.draw_without_rendering()  # lays out while these settings hold
    return figure, hints


def _draw_memory(axis: Axes, ranked: list[Candidate], winner: Candidate | None, hints: dict[str, str]) -> None:
    """One bar per strategy, the best on top; what reaches far beyond the card is cut and says how far it would go."""
    card, margin = ranked[0].estimate.gpu.memory_gib, ranked[0].margin
    end = min(1.12 * max(max(candidate.estimate.device_gib for candidate in ranked), card), 1.75 * card)
    for place, candidate in enumerate(ranked):
        left, name = 0.0, candidate.choice.name
        for part, size in parts(candidate).items():
            (bar,) = axis.barh(
                place,
                min(size, max(0.0, end - left)),
                0.66,
                left,
                color=PARTS[part],
                alpha=1 if candidate.fits else 0.4,
                zorder=2,
            )
            bar.set_gid(f"bar-{place}-{part.split(',')[0]}")
            hints[str(bar.get_gid())] = f"{name}: {part} {size:.1f} of {candidate.estimate.device_gib:.1f} GiB"
            left += size
        said = f"{left:,.0f} GiB{_verdict(candidate)}"
        inside = left > 0.8 * end  # a label stays within the panel, and legible on whatever it crosses
        axis.annotate(
            said,
            (min(left, end), place),
            (-7 if inside else 7, 0),
            "data",
            "offset points",
            va="center",
            ha="right" if inside else "left",
            fontsize=9,
            zorder=5,
            bbox={"boxstyle": "round,pad=0.2", "facecolor": "#ffffff", "edgecolor": "none"},
        )
    for x, text, side in (
        (card, f"card {card:.0f}", "left"),
        ((1 - margin) * card, f"usable {(1 - margin) * card:.0f}", "right"),
    ):
        axis.axvline(x, color=INK, linewidth=1.2, linestyle="-" if side == "left" else "--", zorder=3)
        axis.annotate(
            text,
            (x, 1),
            (4 if side == "left" else -4, 3),
            ("data", "axes fraction"),
            "offset points",
            ha=side,
            va="bottom",
            fontsize=9,
        )
    axis.set_yticks(range(len(ranked)), [_configuration(candidate) for candidate in ranked], fontsize=9)
    for candidate, tick in zip(ranked, axis.get_yticklabels(), strict=True):
        tick.set_fontweight("bold" if candidate is winner else "normal")
    axis.set_xlim(0, end)
    axis.set_ylim(len(ranked) - 0.4, -0.6)
    axis.set_title("Memory of each GPU", loc="left", pad=18, fontweight="bold")
    axis.set_xlabel("GiB")
    _plain(axis, "x")
    handles = [Patch(color=colour) for colour in PARTS.values()]
    axis.legend(
        handles, list(PARTS), loc="upper center", bbox_to_anchor=(0.45, -0.09), ncols=4, frameon=False, fontsize=9
    )


def _configuration(candidate: Candidate) -> str:
    job = candidate.estimate.job
    again = ", recomputes" if job.checkpointing == "full" else ""
    return f"{candidate.choice.name}\nmicro-batch {job.micro_batch}{again}"


def _draw_speed(
    total: Axes,
    each: Axes,
    cluster: Cluster,
    lines: dict[str, list[Point]],
    winner: Candidate | None,
    hints: dict[str, str],
) -> None:
    """Tokens per second over node counts, of all GPUs and of one; the chosen strategy's line is the thick one."""
    total.set_title("Tokens per second, all GPUs", loc="left", fontweight="bold")
    each.set_title("Tokens per second and GPU", loc="left", fontweight="bold")
    if not lines:
        for axis in (total, each):
            axis.set_axis_off()
            axis.annotate(
                f"nothing fits on up to {MOST_NODES} nodes", (0.5, 0.5), xycoords="axes fraction", ha="center"
            )
        return
    best, shown = winner.choice.name if winner else "", list(lines)[:LINES]
    if best and best not in shown:
        shown[-1] = best
    counts = sorted({point.nodes for name in shown for point in lines[name]})
    start = max(
        (points[0] for points in lines.values() if points[0].nodes == counts[0]),
        key=lambda point: point.speed,
        default=lines[shown[0]][0],
    )
    ideal = [start.per_gpu * nodes * cluster.node_size for nodes in counts]
    label = f"ideal, from {start.nodes} node{'s' * (start.nodes > 1)}"
    total.plot(counts, ideal, color=QUIET, linewidth=0.9, zorder=1, label=label)
    each.axhline(start.per_gpu, color=QUIET, linewidth=0.9, zorder=1)
    for index, name in enumerate(shown):
        (colour, marker), width = LOOKS[index], 2.8 if name == best else 1.4
        for axis, value in ((total, "speed"), (each, "per_gpu")):
            y = [getattr(point, value) for point in lines[name]]
            axis.plot(
                [point.nodes for point in lines[name]],
                y,
                color=colour,
                linewidth=width,
                marker=marker,
                markersize=6,
                zorder=2,
                label=f"{name}, chosen" if name == best else name,
            )
            for point in lines[name]:  # one by one, for the pointer
                (mark,) = axis.plot(
                    point.nodes, getattr(point, value), color=colour, marker=marker, markersize=6, zorder=3
                )
                mark.set_gid(f"point-{index}-{point.nodes}-{value}")
                hints[str(mark.get_gid())] = (
                    f"{name} on {counted(point.nodes, 'node')}, {counted(point.gpus, 'GPU')}: "
                    f"{point.speed:,.0f} tokens/s, "
                    f"{point.per_gpu:,.0f} per GPU"
                )
    for axis in (total, each):
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.set_xlim(counts[0] / 1.2, counts[-1] * 1.2)
        axis.axvline(cluster.nodes, color=QUIET, linewidth=0.9, linestyle=":", zorder=1)
        _plain(axis, "y")
    total.set_yscale("log")
    total.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    for axis in (total, each):
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:g} M")
    each.set_ylim(0, 1.12 * max(start.per_gpu, *(point.per_gpu for name in shown for point in lines[name])))
    each.set_xlabel(
        f"nodes of {cluster.node_size} GPU{'s' * (cluster.node_size > 1)}, same global batch (dotted: as planned)"
    )
    total.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _plain(axis: Axes, lines: str) -> None:
    axis.grid(axis=lines, color=GRID, linewidth=0.8, zorder=0)  # type: ignore[arg-type]
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_facecolor("none")


# ---- one file of HTML --------------------------------------------------------------------------------------------
STYLE = """
:root { color-scheme: light dark; --ink: #1c1d21; --quiet: #696b74; --grid: #dcdde2; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e9ed; --quiet: #9a9ca6; --grid: #3a3c44; --paper: #17181c; } }
body { margin: 1.5rem auto; max-width: 1200px; padding: 0 1rem; font: 15px/1.45 "DejaVu Sans", Verdana, sans-serif;
       color: var(--ink); background: var(--paper); }
svg { width: 100%; height: auto; } svg g:hover > path { filter: brightness(1.12); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .chosen { font-weight: bold; } .unfit { color: var(--quiet); }
"""


def _page(
    figure: Figure,
    hints: dict[str, str],
    heading: tuple[str, str],
    ranked: list[Candidate],
    lines: dict[str, list[Point]],
    winner: Candidate | None,
) -> str:
    counts = sorted({point.nodes for points in lines.values() for point in points})
    names = [
        "strategy",
        "micro-batch",
        "recomputes",
        *(f"{part}, GiB" for part in PARTS),
        "of the card, GiB",
        *(f"tokens/s on {count} node{'s' * (count > 1)}" for count in counts),
    ]
    rows = "\n".join(_row(candidate, lines.get(candidate.choice.name, []), counts, winner) for candidate in ranked)
    head = "".join(f"<th>{name}</th>" for name in names)
    title = html.escape(" - ".join(heading))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>\n'
        f'{_svg(figure, hints)}\n<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n'
        "</tbody></table></div>\n</body></html>\n"
    )


def _verdict(candidate: Candidate) -> str:
    if candidate.fits:
        return ""
    return (
        ", does not fit"
        if not candidate.refused
        else ", may hang"
        if "hang" in candidate.refused
        else ", host too small"
    )


def _row(candidate: Candidate, points: list[Point], counts: list[int], winner: Candidate | None) -> str:
    def cells() -> Iterator[str]:
        result, at = candidate.estimate, {point.nodes: f"{point.speed:,.0f}" for point in points}
        yield from (candidate.choice.name, str(result.job.micro_batch))
        yield "layers" if result.job.checkpointing == "full" else "nothing"
        yield from (f"{size:.1f}" for size in parts(candidate).values())
        yield f"{result.device_gib:.1f} of {result.gpu.memory_gib:.0f}{_verdict(candidate)}"
        yield from (at.get(count, "") for count in counts)

    kind = "chosen" if candidate is winner else "" if candidate.fits else "unfit"
    return f'<tr class="{kind}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells()) + "</tr>"


def _svg(figure: Figure, hints: dict[str, str]) -> str:
    """Inline SVG in the page's colours, with a title for the pointer in each element, and nothing that names an address."""
    with io.StringIO() as file, matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "plan"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})  # type: ignore[arg-type]
        text = file.getvalue()
    text = re.sub(r"^.*?(?=<svg)", "", text, flags=re.S)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = text.replace("font-family: 'DejaVu Sans'", "font-family: 'DejaVu Sans', Verdana, sans-serif")
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    for colour, name in ((INK, "ink"), (QUIET, "quiet"), (GRID, "grid"), ("#ffffff", "paper")):
        text = text.replace(colour, f"var(--{name})")

    def hinted(match: re.Match[str]) -> str:
        said = hints.get(match[1])
        return match[0] + (f"<title>{html.escape(said)}</title>" if said else "")

    return re.sub(r'<g id="([^"]+)">', hinted, text)
