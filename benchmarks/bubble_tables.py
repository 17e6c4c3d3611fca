"""The tables and the picture of docs/evidence/pipeline.md, from what benchmarks/bubble.py measured."""

from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.pages import EVIDENCE, Row, markdown

PAGE = EVIDENCE / "pipeline.md"
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
    """Seconds and idle shares of passes that nothing stretches: of each rank, one after the other."""
    lines = []
    for row in sorted_rows(rows):
        parts = row["per_micro_batch"]
        each = (", ".join(f"{1000 * _took(part, kinds):.0f}" for part in parts) for kinds in ("F", "BIW"))
        shares = (", ".join(percent(share) for share in row[key]) for key in ("at_their_own_times", "idle"))
        step = f"{row['seconds']:.2f} s"
        lines.append([row["micro_batches"], NAMES[row["schedule"]], *each, percent(row["formula"]), *shares, step])
    head = ["micro-batches", "schedule", "forward, ms", "backward, ms", "idle by formula", "by the passes' own times"]
    return markdown([*head, "measured", "step"], lines)


def _took(part: dict[str, float], kinds: str) -> float:
    return sum(part[kind] for kind in kinds)


def differences(stretched: list[Row], computed: list[Row]) -> str:
    """In how far measurement, passes' own times and formula are the same."""
    rows = [*stretched, *computed]
    same = sum(all(abs(share - row["formula"]) < 1e-4 for share in row["by_order"]) for row in rows)

    def points(rows: list[Row], key: str, other: str) -> str:
        found = [
            share - (row[other] if other == "formula" else row[other][rank])
            for row in rows
            for rank, share in enumerate(row[key])
        ]
        return f"{100 * min(found):+.1f} to {100 * max(found):+.1f}"

    lines = [
        ["measured", "formula", points(stretched, "idle", "formula"), points(computed, "idle", "formula")],
        [
            "the passes' own times in their order",
            "formula",
            *(points(rows, "at_their_own_times", "formula") for rows in (stretched, computed)),
        ],
        [
            "measured",
            "the passes' own times in their order",
            *(points(rows, "idle", "at_their_own_times") for rows in (stretched, computed)),
        ],
    ]
    text = markdown(["idle share", "minus", "stretched, points", "computed, points"], lines)
    return f"{text}\n\nThe order of passes, all taking as long, gives the formula in {same} of {len(rows)} rows."


def remarks(computed: list[Row]) -> str:
    """What it costs to compute gradients of inputs and of weights one after the other (on the last rank all stages do), and how
    near the planner's form of a step's time comes: (m + w) micro-batches of the slowest rank."""
    last = {(row["schedule"], row["micro_batches"]): _took(row["per_micro_batch"][-1], "BIW") for row in computed}
    more = [last["interleavedzerobubble", m] / last["interleaved1f1b", m] - 1 for m in sorted({m for _, m in last})]
    off = []
    for row in computed:
        slowest = max(_took(part, "FBIW") for part in row["per_micro_batch"])
        off.append(100 * (row["seconds"] / (row["micro_batches"] / (1 - row["formula"]) * slowest) - 1))
    return (
        "- On rank 1, gradients of inputs and of weights one after the other (interleaved zero-bubble) take "
        f"{', '.join(map(percent, more))} longer than both at once (interleaved 1F1B).\n"
        "- The planner's form of a step is (m + w) x the time that the slowest rank takes for a micro-batch. Measured steps "
        f"differ from it by {min(off):+.1f} to {max(off):+.1f} %."
    )


def tables() -> dict[str, str]:
    rows = pages.read(RESULTS)
    stretched, computed = ([row for row in rows if row["way"] == way] for way in ("stretched", "computed"))
    where = f"Measured on: {rows[0]['machine']}; {rows[0]['versions']}."
    return {
        "differences": f"{differences(stretched, computed)}\n\n{where}",
        "picture": drawn_table([row for row in rows if "lines" in row]),
        "computed": f"{computed_table(computed)}\n\n{remarks(computed)}",
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
                axis.text(
                    (begin + end) / 2,
                    rank,
                    str(number + 1),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if later else "black",
                )
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
    pairs: list[Any] = [tuple(handles[place : place + 2]) for place in range(0, len(handles), 2)]
    names = [f"{name} (dark: the rank's second stage)" if kind == "F" else name for kind, (*_, name) in LOOKS.items()]
    figure.legend(
        pairs,
        names,
        loc="outside upper center",
        ncols=len(names),
        frameon=False,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        handlelength=3,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
