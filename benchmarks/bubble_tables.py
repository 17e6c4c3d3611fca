"""The tables and the picture of docs/pipeline.md, from what benchmarks/bubble.py measured."""

from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.pages import DOCS, Row, markdown

PAGE = DOCS / "pipeline.md"
RESULTS = pages.RESULTS / "bubble.jsonl"
NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved1f1b": "interleaved 1F1B",
    "interleavedzerobubble": "interleaved zero-bubble",
    "zbv": "ZBV",
}
# Okabe and Ito's colours, which colour-blind readers tell apart, and darker ones of the same hue for a rank's second stage.
LOOKS = {
    "F": ("#56B4E9", "#0A5F99", "forward"),
    "B": ("#E69F00", "#A04A00", "backward, whole"),
    "I": ("#F0E442", "#857C00", "backward, gradients of inputs"),
    "W": ("#2FBF96", "#006B4E", "backward, gradients of weights"),
}


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def sorted_rows(rows: list[Row]) -> list[Row]:
    order = list(NAMES)
    return sorted(rows, key=lambda row: (row["micro_batches"], order.index(row["schedule"])))


def whole_table(rows: list[Row], ranks: int) -> str:
    """Idle shares of every rank, of stretched passes."""
    head = ["micro-batches", "schedule", "stages on each rank", "formula", *(f"rank {rank}" for rank in range(ranks))]
    lines = [
        [
            row["micro_batches"],
            NAMES[row["schedule"]],
            row["virtual"],
            percent(row["formula"]),
            *map(percent, row["idle"]),
        ]
        for row in sorted_rows(rows)
    ]
    return markdown(head, lines)


def drawn_table(rows: list[Row]) -> str:
    """What the picture shows, in figures."""
    lines = []
    for row in sorted_rows(rows):
        between = row["idle_between"]
        held = (
            f"{min(row['held']):g}" if len(set(row["held"])) == 1 else f"{max(row['held']):g} to {min(row['held']):g}"
        )
        lines.append(
            [
                NAMES[row["schedule"]],
                f"{row['seconds']:.2f} s",
                percent(row["formula"]),
                percent(sum(row["idle"]) / len(row["idle"])),
                f"{percent(min(between))} to {percent(max(between))}",
                held,
            ]
        )
    return markdown(
        [
            "schedule",
            "step",
            "idle by formula",
            "idle, mean of ranks",
            "idle between a rank's own first and last pass",
            "micro-batches kept, first to last rank",
        ],
        lines,
    )


def computed_table(rows: list[Row]) -> str:
    lines = []
    for row in sorted_rows(rows):
        parts = row["per_micro_batch"]
        forward, backward = (
            ", ".join(f"{1000 * sum(part[kind] for kind in kinds):.0f}" for part in parts) for kinds in ("F", "BIW")
        )
        shares = (", ".join(percent(share) for share in row[key]) for key in ("at_their_own_times", "idle"))
        lines.append(
            [row["micro_batches"], NAMES[row["schedule"]], forward, backward, percent(row["formula"]), *shares]
        )
    head = [
        "micro-batches",
        "schedule",
        "forward, ms",
        "backward, ms",
        "formula",
        "by the passes' own times",
        "measured",
    ]
    return markdown(head, lines)


def tables() -> dict[str, str]:
    rows = pages.read(RESULTS)
    stretched, computed = ([row for row in rows if row["way"] == way] for way in ("stretched", "computed"))
    same = sum(all(abs(share - row["formula"]) < 1e-4 for share in row["by_order"]) for row in rows)
    more = [share - row["formula"] for row in stretched for share in row["idle"]]
    off = [
        share - expected
        for row in computed
        for share, expected in zip(row["idle"], row["at_their_own_times"], strict=True)
    ]
    measured = (
        f"Passes stretched: measured minus formula is {100 * min(more):.1f} to {100 * max(more):.1f} percentage points. "
        f"Arithmetic alone: measured minus the passes' own times in that order is {100 * min(off):.1f} to "
        f"{100 * max(off):.1f}. The order of passes, with equal times, gives the formula in {same} of {len(rows)} rows.\n\n"
        f"Measured on: {rows[0]['machine']}; {rows[0]['versions']}."
    )
    return {
        "measured": measured,
        "picture": drawn_table([row for row in rows if "lines" in row]),
        "computed": computed_table(computed),
        **{
            f"stretched-{ranks}": whole_table([row for row in stretched if row["ranks"] == ranks], ranks)
            for ranks in (2, 4)
        },
    }


def draw(rows: list[Row], path: Path) -> None:
    """A panel for each schedule: one step, a time line per rank, passes coloured and with the number of their micro-batch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.legend_handler import HandlerTuple

    drawn = sorted_rows([row for row in rows if "lines" in row])
    figure, axes = plt.subplots(len(drawn), 1, figsize=(15, 2.05 * len(drawn)), sharex=True, layout="constrained")
    for axis, row in zip(axes, drawn, strict=True):
        for rank, line in enumerate(row["lines"]):
            first = min(each[0] for each in line)
            for stage, kind, number, begin, end in line:
                if end - begin < 1e-3:  # what the first stage leaves out
                    continue
                later = stage != first
                axis.barh(rank, end - begin, 0.86, begin, color=LOOKS[kind][later], edgecolor="black", linewidth=0.4)
                axis.text((begin + end) / 2, rank, str(number + 1), ha="center", va="center", fontsize=8,
                          color="white" if later else "black")  # fmt: skip
        axis.set_yticks(range(row["ranks"]), [f"rank {rank}" for rank in range(row["ranks"])])
        axis.invert_yaxis()
        idle, each = percent(sum(row["idle"]) / len(row["idle"])), f", {row['virtual']} stages on each rank"
        said = f"a rank idles {idle} of {row['seconds']:.2f} s (formula {percent(row['formula'])})"
        title = f"{NAMES[row['schedule']]}{each * (row['virtual'] > 1)}: {said}"
        axis.set_title(title, loc="left", fontsize=11)
        axis.axvline(row["seconds"], color="black", linewidth=1)
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1].set_xlim(0, 1.005 * max(row["seconds"] for row in drawn))
    axes[-1].set_xlabel("seconds; white: the rank waits")
    colours = [colour for looks in LOOKS.values() for colour in looks[:2]]
    handles: list[Any] = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours]
    pairs = [tuple(handles[place : place + 2]) for place in range(0, len(handles), 2)]
    names = [f"{name} (dark: the rank's second stage)" if kind == "F" else name for kind, (*_, name) in LOOKS.items()]
    figure.legend(pairs, names, loc="outside upper center", ncols=len(names), frameon=False,
                  handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, handlelength=3)  # fmt: skip
    figure.savefig(path, dpi=110)
    plt.close(figure)
