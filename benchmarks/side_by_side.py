"""How fast train.py is beside another program that does the same in turn: rows of results, and their table.

A row is one round of one program: its name, program, round, items per second, peak memory in GiB, the share of the machine's CPU
time that other processes had meanwhile, and where it was measured.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.pages import Row, in_words, markdown, read, save, where
from benchmarks.peers_tables import OURS, ratios, spread


def rows_of(name: str, rounds: Mapping[str, Sequence[Row]], items: int) -> list[Row]:
    """Return the rows of all rounds. rounds: program -> "seconds", "peak_memory_gib" and "others" of each; items: of a round"""
    here = where()
    return [
        {
            "name": name,
            "program": program,
            "round": number,
            "per_second": round(items / each["seconds"], 4),
            "peak_memory_gib": round(each["peak_memory_gib"], 3),
            "others": each["others"],
            **here,
            **({"versions": in_words(each["versions"])} if "versions" in each else {}),  # of the peers' environment
        }
        for program, given in rounds.items()
        for number, each in enumerate(given)
    ]


def keep(path: Path, rows: list[Row]) -> None:
    """Write rows into a file of results, in place of those that it has of the same names."""
    names = {row["name"] for row in rows}
    others = [row for row in read(path) if row["name"] not in names] if path.exists() else []
    save(path, others + rows)


def table(rows: Sequence[Row], names: Mapping[str, str], beside: str) -> str:
    """Return a line for each of these names that rows have, as medians of the rounds; "" where they have none.

    names: name -> what the line is called; beside: the other program's name
    """
    lines, measured = [], dict[str, None]()
    for name, title in names.items():
        found = [row for row in rows if row["name"] == name]
        own = [row for row in found if row["program"] == OURS]
        other = [row for row in found if row["program"] != OURS]
        if not (own and other):
            continue
        mine, its = ({row["round"]: row["per_second"] for row in part} for part in (own, other))
        memory = [f"{statistics.median(row['peak_memory_gib'] for row in part):.2f} GiB" for part in (own, other)]
        rates = [spread(list(mine.values()), 2), spread(list(its.values()), 2), spread(ratios(mine, its), 2)]
        lines.append([title, len(mine), *rates, *memory, f"{max(row['others'] for row in own + other):.0%}"])
        measured |= dict.fromkeys(f"{row['machine']}; {row['versions']}." for row in own + other)
    head = ["", "rounds", "Brigade per second", f"{beside} per second", f"Brigade / {beside}", "memory of Brigade",
            f"memory of {beside}", "others' CPU time, at most"]  # fmt: skip
    return "\n\n".join([markdown(head, lines), *measured]) if lines else ""
