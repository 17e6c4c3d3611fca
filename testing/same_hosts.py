"""Hosts that are the same but for what a test says, and what check judges of them."""

from typing import Any

from brigade.check.checks import Facts, Result, Wanted
from brigade.errors import versions
from testing.recorded_hosts import Recorded, grouped, results_of

PINS = versions.pins()
LOOK = {
    "python": "CPython 3.11.7",
    "lost": {},
    "packages": {**PINS, "torch": f"{PINS['torch']}+cu128"},
    "torch": {"cuda": "12.8", "cudnn": "9.10.2.21", "nccl": "2.27.3"},
    "driver": "570.86.15",
    "kernel": "6.8.0-51-generic",
    "machine": "x86_64",
    "glibc": "2.39",
    "git": {"commit": "a" * 40, "changed": []},
    "variables": {"NCCL_ALGO": {"is": "Ring"}, "HF_TOKEN": {"hash": "1234"}},
    "own": {},
    "paths": {"code": {"there": True, "real": "/code"}, "environment": {"there": True, "real": "/opt/env"}},
}


def judged(
    name: str,
    *own: Facts,
    loaded: Any = None,
    files: Any = None,
    projects: Any = None,
    imports: Any = None,
    gpus: int = 0,
    sees: Any = None,
    environment: Any = None,
) -> dict[str, list[Result]]:
    """Results by host of one check. own: for node1, node2, ... what differs from LOOK; gpus: of each host"""
    looks = {f"node{number}": LOOK | one for number, one in enumerate(own, 1)}
    hello = {host: {"project": (projects or {}).get(host, "same"), "gpus": gpus} for host in looks}
    answers = {"sameness.look": looks, "sameness.files": files or {}, "sameness.loaded": loaded or {}}
    answers |= {"sameness.imports": imports or {}, "sameness.sees_gpus": sees or {}}
    hosts = Recorded(Wanted(dict.fromkeys(looks, 8), environment=environment or {}), answers, hello)
    return grouped(results_of(name, hosts))


def odd(name: str, own: Facts, **more: Any) -> Result:
    """The one result of the odd host of three; the others are sound."""
    found = judged(name, {}, own, {}, **more)
    assert [r.level for host in ("node1", "node3") for r in found[host]] == ["green", "green"], found
    (result,) = found["node2"]
    assert result.level == "green" or (result.why and result.cure)
    return result


def variables(**values: Any) -> Facts:
    return {"variables": LOOK["variables"] | values}
