"""What a check found on four hosts, made up."""

from typing import Any

from brigade.check.checks import Result
from brigade.check.run import Outcome, Row

NODES = {f"node{number}": 8 for number in range(1, 5)}


def outcome(rows: dict[str, list[Result]], hosts: dict[str, int] = NODES) -> Outcome:
    """rows: name -> results"""
    return Outcome(dict(hosts), "quick", [Row(name, "reach", results, 0.1) for name, results in rows.items()], 1.0)


def bad(host: str, value: str = "1500", level: str = "red", **more: Any) -> Result:
    return Result(host, level, value, None, f"{host} has {value}", "it matters", f"ssh {host} repair", **more)
