"""The page docs/evidence/court.md, from results/court.jsonl and notes.yaml."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from benchmarks import pages

from .jobs import PEERS
from .questions import HERE, read

PAGE = pages.EVIDENCE / "court.md"
RESULTS = pages.RESULTS / "court.jsonl"
CONTROL = "deepspeed_0_18"  # a known fault: no column of its own
WORDS = {"wrong": "**wrong**", "failed": "not to be had"}  # for kinds that do not stand there by their names
Row = dict[str, Any]


def without_paths(text: str, folder: Path) -> str:
    """Return a message on one line, without this machine's paths."""
    text = re.sub(r"\x1b\[\d*m", "", " ".join(text.replace(str(folder), "FOLDER").split()))
    text = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+site-packages/", "", text)
    text = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)
    return text if len(text) <= 300 else f"{text[:300]} ..."


def notes() -> dict[str, dict[str, Row]]:
    """Return what was read of each peer's code or issues beside a question: {"kind" (where numbers do not tell it), "why"}."""
    return yaml.safe_load((HERE / "notes.yaml").read_text())


def refusals(peer: str) -> dict[str, str]:
    """Return what a peer says of each question that it does not do, and that is therefore not put to it."""
    refuses = notes().get(peer, {}).get("refuses", {})
    return {question: words for words, questions in refuses.items() for question in questions}


def write(rows: Iterable[Row]) -> None:
    """Put rows of results in place of those of the same peer and question, and write the page."""
    kept = {(row["peer"], row["question"]): row for row in (pages.read(RESULTS) if RESULTS.exists() else [])}
    kept |= {(row["peer"], row["question"]): row for row in rows}
    asked = list(read())
    order = sorted(kept.values(), key=lambda row: (list(PEERS).index(row["peer"]), asked.index(row["question"])))
    pages.save(RESULTS, order)
    pages.write(PAGE, tables())


def kind_of(row: Row, noted: dict[str, dict[str, Row]]) -> str:
    return str(noted.get(row["peer"], {}).get(row["question"], {}).get("kind", row["verdict"]))


def cell(row: Row | None, noted: dict[str, dict[str, Row]]) -> str:
    """Return one answer as a cell of the table: its kind, and by how much what is wrong is wrong."""
    if row is None:
        return "not asked"
    kind = kind_of(row, noted)
    numbers = [value for value in row["differences"].values() if value == value]
    much = f" by {max(numbers):.0e}" if kind == row["verdict"] == "wrong" and numbers and "loss " in row["said"] else ""
    return WORDS.get(kind, kind) + much


def tables() -> dict[str, str]:
    """Return the tables of the page."""
    rows, noted = pages.read(RESULTS), notes()
    by = {(row["peer"], row["question"]): row for row in rows}
    peers = [peer for peer in PEERS.values() if any(row["peer"] == peer.name for row in rows) and peer.name != CONTROL]
    lines = [[f"`{name}`", *(cell(by.get((peer.name, name)), noted) for peer in peers)] for name in read()]
    asked = [[f"`{name}`", question.asks] for name, question in read().items()]
    table = pages.markdown(["question", *(peer.title for peer in peers)], lines)
    return {
        "court-questions": pages.markdown(["question", "what it asks"], asked),
        "court": table,
        "not-equal": paragraphs(rows, noted),
        "court-versions": versions(rows),
    }


def paragraphs(rows: list[Row], noted: dict[str, dict[str, Row]]) -> str:
    """Return a paragraph for each answer that is not equal, or the control's; of several with the same words, one."""
    found = []
    for peer in PEERS.values():
        same: dict[str, list[str]] = {}
        for row in rows:
            kind = kind_of(row, noted)
            if row["peer"] == peer.name and (kind != "equal" or peer.name == CONTROL):
                found_here = row["said"] or pages.in_words(row["differences"])
                why = noted.get(peer.name, {}).get(row["question"], {}).get("why", "")
                said = " ".join(filter(None, (f"{WORDS.get(kind, kind)}: {_sentence(found_here)}", why)))
                same.setdefault(said, []).append(f"`{row['question']}`")
        if same:
            found += [f"**{peer.title}**", "\n".join(f"- {', '.join(names)}: {said}" for said, names in same.items())]
    return "\n\n".join(found)


def _sentence(said: str) -> str:
    said = said.replace("<", "\\<").rstrip(":")
    return said if not said or said.endswith(".") else f"{said}."


def versions(rows: list[Row]) -> str:
    """Return what each peer ran with, and when."""
    lines = []
    for peer in PEERS.values():
        of_peer = [row for row in rows if row["peer"] == peer.name and row["versions"]]
        if of_peer:
            dates = sorted({row["date"] for row in of_peer})
            found = {name: version for row in of_peer for name, version in row["versions"].items()}
            lines.append([peer.title, pages.in_words(found), " to ".join(dict.fromkeys((dates[0], dates[-1])))])
    return pages.markdown(["trainer", "versions", "run on"], lines)
