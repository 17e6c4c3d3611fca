"""Judge which of a proof's paths is the fastest, and merge two proofs of the same thing."""

from collections.abc import Collection

from . import paths
from .paths import ATTENTION, PROVEN, SLOWER, WRONG, Row

TRIES = 3  # for a path that ran out of time: the disk may have been cold or the GPU busy
CLOSE = 1.03  # times that are closer cannot be told apart: the table's order decides


def answered(row: Row) -> bool:
    """Whether a path of a proof has a status for a reason other than lack of time."""
    return "status" in row and not row.get("timeouts")


def tried_with_another(row: Row, attention: str) -> bool:
    """Whether a path was tried with another attention than this one."""
    return bool(row.get("attention", attention) != attention)


def taken_by_auto(rows: dict[str, Row], results: dict[str, Row]) -> str:
    """The attention that `auto` takes. rows: of a table of paths; results: of a proof's"""
    choices = {name: rows[name] for name, row in results.items() if row["kind"] == ATTENTION and name in rows}
    choices = {name: row for name, row in choices.items() if row.get("auto")}
    return judge(choices, {name: unjudged(results[name]) for name in choices}).get(ATTENTION, "eager")


def unjudged(row: Row) -> Row:
    """A path's answer as it was before judge() compared it with others."""
    return row | {"status": PROVEN, "why": ""} if row["status"] == SLOWER else dict(row)


def to_try(proof: Row, kinds: Collection[str] = (ATTENTION,), attention: str = "auto") -> list[str]:
    """Paths of these kinds that a run's short proof lacks: nobody asked for them then, or only with another attention, or they
    ran out of time fewer than TRIES times. attention: the recipe's"""
    if attention == "auto":
        attention = taken_by_auto(paths.table(), proof["paths"])

    def is_open(row: Row | None) -> bool:
        return row is None or tried_with_another(row, attention) or 0 < row.get("timeouts", 0) < TRIES

    quick = [name for name, row in paths.table().items() if row.get("quick") and row["kind"] in kinds]
    return [name for name in quick if is_open(proof["paths"].get(name))]


def merged(old: Row, new: Row) -> Row:
    """A new proof with what an older one of the same key knows beyond it: everything in a full one, unless the new one found
    that a path computes something else, or tried it with another attention; and answers of paths that now ran out of time."""
    fuller = new.get("quick") and not old.get("quick")
    attention = next((row["attention"] for row in new["paths"].values() if "attention" in row), None)

    def stays(name: str, row: Row) -> bool:
        newer = new["paths"].get(name)
        if attention and tried_with_another(row, attention):  # sets are compared with each other
            return False
        if newer is None:
            return True
        return answered(row) and (not answered(newer) or bool(fuller and newer["status"] != WRONG))

    kept = {name: row for name, row in old["paths"].items() if stays(name, row)}
    if not kept:
        return new
    results = {name: unjudged(row) for name, row in (new["paths"] | kept).items()}
    rows = {name: row for name, row in paths.table().items() if name in results}
    rows |= {name: {"kind": row["kind"]} for name, row in results.items() if name not in rows}
    return new | {
        "quick": bool(new.get("quick") and old.get("quick")),
        "fastest": judge(rows, results),
        "paths": results,
    }


def judge(rows: dict[str, Row], results: dict[str, Row]) -> dict[str, str]:
    """{kind: the fastest path that agrees}. In `results`, those that another beats become "slower".

    A path without a time ranks behind all that have one.
    """
    fastest: dict[str, str] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows.values()):
        right = [name for name in rows if rows[name]["kind"] == kind and results[name]["status"] == PROVEN]
        right = [name for name in right if may_be_timed(results[name])]
        timed = [name for name in right if results[name].get("ms") is not None]
        if not right:
            continue
        best = min((results[name]["ms"] for name in timed), default=None)
        first = [name for name in timed if best is not None and results[name]["ms"] <= CLOSE * best]
        fastest[kind] = (first or right)[0]
        for name in timed:
            if name not in first:
                results[name] |= {
                    "status": SLOWER,
                    "why": f"{results[name]['ms'] / best:.2f}x the time of {fastest[kind]}",
                }
        for name in right:
            if timed and name not in timed:
                results[name] |= {"status": SLOWER, "why": results[name].get("why") or "it agrees, but was not timed"}
    return fastest


def may_be_timed(row: Row) -> bool:
    """Whether `auto` has a choice about a path: a dtype is the recipe's choice, and some paths have no backward pass here."""
    return row["kind"] != paths.DTYPE and not row.get("forward_only")
