"""The tables of docs/evidence/architectures.md: a row for each type of config, and why something does not train it."""

import re
from collections import defaultdict

from . import pages

PAGE = pages.EVIDENCE / "architectures.md"
Rows = dict[tuple[str, str], pages.Row]
WORDS = {"builds": "yes", "trains": "yes", "equal": "=", "refused": "no", "fails": "**fails**"}
LAYOUTS = ("end to end", "padded")  # how the samples of a micro-batch lie, as its run says


def tables(rows: Rows, columns: list[str]) -> dict[str, str]:
    """The page's tables by name. columns: in their order, the first the one without which nothing else is tried"""
    return {
        "architectures-count": count(rows, columns),
        "architectures": table(rows, columns),
        "architectures-why": reasons(rows, columns),
        "architectures-measured": measured(rows),
    }


def cell(row: pages.Row | None, column: str) -> str:
    """What stands in a column of a type's row: "" where nothing was tried, because what it is compared with does not train."""
    if row is None:
        return ""
    if row["verdict"] == "differs":
        return f"**{row['difference']:.0e}**"
    if column == "one process" and row["verdict"] == "trains":
        return next(filter(row["why"].startswith, LAYOUTS), "yes")
    return WORDS[row["verdict"]]


def trains(rows: Rows, name: str, column: str) -> bool:
    """Whether a type trains in a column that is compared with no other."""
    return rows.get((name, column), {}).get("verdict") == "trains"


def table(rows: Rows, columns: list[str]) -> str:
    """A line for each type of config whose tiny model train.py does not refuse."""
    names = sorted(name for (name, column), row in rows.items() if column == columns[0] and row["verdict"] != "refused")
    lines = [[f"`{name}`", *(cell(rows.get((name, column)), column) for column in columns)] for name in names]
    return pages.markdown(["type of config", *columns], lines)


def count(rows: Rows, columns: list[str]) -> str:
    """How many types each column trains, refuses and fails with."""
    lines = []
    for column in ["builds", *columns]:
        verdicts = [row["verdict"] for (_, of), row in rows.items() if of == column]
        well = sum(verdict in ("builds", "trains", "equal") for verdict in verdicts)
        lines.append([column, well, *(verdicts.count(verdict) for verdict in ("differs", "refused", "fails"))])
    return pages.markdown(["", "well", "differs", "refused", "fails"], lines)


def reasons(rows: Rows, columns: list[str]) -> str:
    """Each reason once, with the types that it holds for; a type's own name in it is "it"."""
    types: dict[tuple[str, str], list[str]] = defaultdict(list)
    for column in ["builds", *columns]:
        for (name, of), row in sorted(rows.items()):
            if column not in ("builds", columns[0]) and not trains(rows, name, columns[0]):
                continue  # for the reason that stands there
            if of == column and row["why"] and row["verdict"] in ("refused", "fails"):
                types[column, general(row["why"], name)].append(name)
            if of == column == "one process" and row["why"].startswith("padded"):
                types["end to end", general(row["why"].removeprefix("padded: "), name)].append(name)
    lines = [[column, why, ", ".join(f"`{name}`" for name in names)] for (column, why), names in types.items()]
    return pages.markdown(["what", "why not", "types of config"], lines)


def general(why: str, name: str) -> str:
    """A reason without the names of its model's type and classes, and with no sign that Markdown reads."""
    why = re.sub(r"(/[\w.-]+)+/", "", why)  # folders of this machine
    camel = name.removesuffix("_text").replace("_", "")
    why = re.sub(rf"\b{camel}\w*(Config|Model|ForCausalLM)\b", "it", why, flags=re.IGNORECASE)
    why = re.sub(rf"\b{re.escape(name)}\b", "it", why)
    return why.replace("|", "/").replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")


def measured(rows: Rows) -> str:
    """Where and with what all this was measured."""
    places: dict[str, set[str]] = {}
    for (name, _), row in rows.items():
        places.setdefault(f"{row['machine']}; {row['versions']}", set()).add(name)
    return "\n\n".join(f"{len(places[place])} types of config, measured on {place}." for place in sorted(places))
