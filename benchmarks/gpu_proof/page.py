"""The page of a proof, alone or beside another machine's. Standard library only."""

from collections.abc import Iterable
from typing import Any

# Figures that are compared between machines: the same everywhere where they are equal, more is better, or less is.
MORE = ("tokens_per_second", "mfu", "mfu_of_work_done")
LESS = (
    "step_time",
    "peak_memory_gib",
    "allocated_gib",
    "blocked_s",
    "whole_after_s",
    "per_step",
    "difference",
    "milliseconds",
)


def check(report: Any) -> None:
    """Raise ValueError for what is no report of this command."""
    if not isinstance(report, dict) or report.get("format") != 2 or not isinstance(report.get("parts"), dict):
        raise ValueError("it is no report of this format")


def summary(part: dict[str, Any]) -> str:
    """Return a part in one line of the terminal."""
    short = [row["what"] for row in part["rows"] if row["fell_short"]]
    words = f"{len(part['rows'])} rows in {part['seconds']:.0f} s"
    words += f", fell short: {', '.join(short)}" if short else ""
    words += f", {out} left out" if (out := sum(bool(row["left_out"]) for row in part["rows"])) else ""
    return words + "".join(f"; {part[key]}" for key in ("fell_short", "left_out") if part[key])


def verdict(report: dict[str, Any]) -> str:
    """Return what the whole proof says: a line, one with its command for each thing that fell short, and what was left out."""
    short, out = report["fell_short"], left_out(report)
    hold = sum(
        not row["fell_short"] and not row["left_out"] for part in report["parts"].values() for row in part["rows"]
    )
    devices = ", ".join(report["machine"].get("devices") or ["no GPU"])
    counts = [f"{hold} rows hold", f"{len(short)} fell short" if short else "nothing fell short"]
    counts += [f"{sum(map(len, out.values()))} left out, which is no failure"] if out else []
    lines = [f"{devices}: {', '.join(counts)}."]
    for each in short:
        lines += [f"- {each['part']}, {each['what']}: {each['why']}", f"      {each['command']}"]
    lines += [f"- left out, {part}: {why} ({', '.join(names)})" for (part, why), names in out.items()]
    return "\n".join(lines)


def left_out(report: dict[str, Any]) -> dict[tuple[str, str], list[str]]:
    """Return (part, why) -> what was not tried, or not to its end."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, part in report["parts"].items():
        for each in [*part["rows"], part | {"what": "all of it"}]:
            if each["left_out"]:
                found.setdefault((name, each["left_out"]), []).append(each["what"])
    return found


def page(report: dict[str, Any], other: dict[str, Any] | None = None) -> str:
    """Return the page in Markdown. other: the report of another machine, which gets a column of its own"""
    machine, packages = report["machine"], report["packages"]
    sections = ["# What this host's GPUs have proven", verdict(report)]
    if report["small"]:
        sections.append("**With --small: tiny shapes and few steps. This proves the command, and no GPU.**")
    about = {key: machine.get(key) for key in ("devices", "memory_gib", "driver", "cuda", "nccl", "commit")}
    lines = [[key, in_words(value)] for key, value in about.items()] + [["began", report["began"]]]
    lines += [[name, version] for name, version in packages["versions"].items()]
    sections += ["## Machine", table(["", "here"], lines), packages["proves"]]
    for name, part in report["parts"].items():
        if name == "machine":
            continue
        sections += [f"## {name.capitalize()}", f"{summary(part)}. `{part['command']}`", rows_table(part["rows"])]
    if other:
        sections += ["## Beside another machine", beside(report, other)]
    return "\n\n".join(section for section in sections if section)


def rows_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of a part: a column for each figure that some row has."""
    if not rows:
        return ""
    keys = list(dict.fromkeys(key for row in rows for key in row["figures"] if key != "places"))
    lines = [
        [
            row["what"],
            status(row),
            *(in_words(row["figures"].get(key)) for key in keys),
        ]
        for row in rows
    ]
    return table(["", "", *(key.replace("_", " ") for key in keys)], lines)


def status(row: dict[str, Any]) -> str:
    return "fell short" if row["fell_short"] else "left out" if row["left_out"] else "holds"


def beside(report: dict[str, Any], other: dict[str, Any]) -> str:
    """Return the figures that both machines have, with their ratio, and what only one of them holds."""
    here, there = by_row(report), by_row(other)
    lines = []
    for key, row in here.items():
        if not (match := there.get(key)):
            continue
        if status(row) != status(match):
            lines.append([*key, "", status(row), status(match), ""])
        for name in (*MORE, *LESS):
            ours, theirs = (each["figures"].get(name) for each in (row, match))
            if isinstance(ours, int | float) and isinstance(theirs, int | float):
                ratio = f"{ours / theirs:.2f}" if theirs else ""
                lines.append([*key, name.replace("_", " "), in_words(ours), in_words(theirs), ratio])
    names = [", ".join(each["machine"].get("devices") or ["no GPU"]) for each in (report, other)]
    text = table(["part", "", "figure", f"here: {names[0]}", f"there: {names[1]}", "here / there"], lines)
    only = [f"{part} {what}" for part, what in here.keys() ^ there.keys()]
    differing = [name for name, version in report["packages"]["versions"].items()
                 if other["packages"]["versions"].get(name) != version]  # fmt: skip
    notes = [f"Versions differ: {', '.join(differing)}."] if differing else []
    notes += [f"On one of them only: {', '.join(sorted(only))}."] if only else []
    notes += (
        ["At least one of them was measured with --small: its figures are no GPU's."]
        if report["small"] or other["small"]
        else []
    )
    return "\n\n".join([text, *notes])


def by_row(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return (part, what) -> row, of all parts but the machine's own."""
    parts = {name: part for name, part in report["parts"].items() if name != "machine"}
    return {(name, row["what"]): row for name, part in parts.items() for row in part["rows"]}


def in_words(value: Any) -> str:
    """Return a figure as a cell has it."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(in_words, value))
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("|", "/")


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    head = list(head)
    return "\n".join(
        [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(line)} |" for line in lines)]
    )
