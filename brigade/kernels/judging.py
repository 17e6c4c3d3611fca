"""Which of a proof's paths is the fastest, and what two proofs of the same thing know together."""

from collections.abc import Collection
from typing import Any

from . import paths
from .paths import ATTENTION, PROVEN, SET, SLOWER, WRONG

Row = dict[str, Any]
TRIES = 3  # of a path that ran out of time: it may have been a cold disk or a busy GPU
CLOSE = 1.03  # times that are closer cannot be told apart: the table's order decides


def answered(row: Row) -> bool:
    """Whether a path of a proof has a status that is not for want of time alone."""
    return "status" in row and not row.get("timeouts")


def unjudged(row: Row) -> Row:
    """A path's answer before judge() held it against others."""
    return row | {"status": PROVEN, "why": ""} if row["status"] == SLOWER else dict(row)


def to_try(proof: Row, kinds: Collection[str] = (ATTENTION,), attention: str = "auto") -> list[str]:
    """Paths of these kinds that a first run's proof lacks: nobody asked for them then, or only with another attention; or they
    ran out of time, fewer than TRIES times."""

    def is_open(row: Row | None) -> bool:
        other = row is not None and row["kind"] == SET and attention not in ("auto", row.get("attention"))
        return row is None or other or 0 < row.get("timeouts", 0) < TRIES

    quick = [name for name, row in paths.table().items() if row.get("quick") and row["kind"] in kinds]
    return [name for name in quick if is_open(proof["paths"].get(name))]


def merged(old: Row, new: Row) -> Row:
    """A new proof with what an older one of the same key knows beyond it: all of a full one, unless the new one found that a path
    computes something else; and answers of paths that ran out of time this time."""
    fuller = new.get("quick") and not old.get("quick")

    def stays(name: str, row: Row) -> bool:
        its = new["paths"].get(name)
        if its is None:
            return True
        return answered(row) and (not answered(its) or bool(fuller and its["status"] != WRONG))

    kept = {name: row for name, row in old["paths"].items() if stays(name, row)}
    if not kept:
        return new
    found = {name: unjudged(row) for name, row in (new["paths"] | kept).items()}
    rows = {name: row for name, row in paths.table().items() if name in found}
    rows |= {name: {"kind": row["kind"]} for name, row in found.items() if name not in rows}
    return new | {"quick": bool(new.get("quick") and old.get("quick")), "fastest": judge(rows, found), "paths": found}


def judge(rows: dict[str, Row], found: dict[str, Row]) -> dict[str, str]:
    """{kind: the fastest path that agrees}; those that another beats become "slower" in `found`.

    A path without a time is behind all that have one."""
    fastest: dict[str, str] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows.values()):
        right = [name for name in rows if rows[name]["kind"] == kind and found[name]["status"] == PROVEN]
        right = [name for name in right if may_be_timed(found[name])]
        timed = [name for name in right if found[name].get("ms") is not None]
        if not right:
            continue
        best = min((found[name]["ms"] for name in timed), default=None)
        first = [name for name in timed if best is not None and found[name]["ms"] <= CLOSE * best]
        fastest[kind] = (first or right)[0]
        for name in timed:
            if name not in first:
                found[name] |= {"status": SLOWER, "why": f"{found[name]['ms'] / best:.2f}x the time of {fastest[kind]}"}
        for name in right:
            if timed and name not in timed:
                found[name] |= {"status": SLOWER, "why": found[name].get("why") or "it agrees, but was not timed"}
    return fastest


def may_be_timed(row: Row) -> bool:
    """Whether a path can be taken or left: a dtype is the recipe's choice, and some have no backward pass here."""
    return row["kind"] != paths.DTYPE and not row.get("forward_only")
