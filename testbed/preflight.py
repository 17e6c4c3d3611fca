"""Each fault that `python -m brigade check` has to find, on real hosts: bring it about, check, undo it."""

import json
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from . import check_network, check_reach, check_same, check_storage
from .cluster import Cluster
from .injected import Injected

INJECTED: list[Injected] = [
    *check_reach.INJECTED,
    *check_same.INJECTED,
    *check_storage.INJECTED,
    *check_network.INJECTED,
]
RECIPE = "recipes/tiny/full.yaml"


@dataclass(frozen=True)
class Attempt:
    """found: the document of `check --json -`; seconds: of the whole command; said: its output and errors"""

    found: dict[str, Any]
    seconds: float
    said: str
    exit_code: int

    def levels(self, check: str = "") -> dict[str, list[str]]:
        """host -> the levels that a check, or any check, gave it"""
        found: dict[str, list[str]] = {}
        for row in self.found["checks"]:
            if check in ("", row["name"]):
                for result in row["results"]:
                    found.setdefault(result["host"], []).append(result["level"])
        return found


def check(cluster: Cluster, size: str = "quick", words: str = "", timeout: float = 300) -> Attempt:
    """Run the command on the first host, for the tiny recipe with an output directory that all hosts share."""
    flag = "" if size == "usual" else f"--{size}"
    words = words if "--output_dir" in words else f"{words} --output_dir SHARED/preflight"
    words = words.replace("SHARED", str(cluster.shared))
    hostfile = cluster.shared / "hostfile"
    if not hostfile.exists():
        cluster.hostfile(1)
    line = f"{sys.executable} -m brigade check {RECIPE} --hostfile {hostfile} {flag} --json - {words}"
    began = time.monotonic()
    done = cluster.hosts[0].run(line, timeout=timeout, check=False)
    seconds = time.monotonic() - began
    try:
        found = json.loads(done.stdout)
    except ValueError:
        raise AssertionError(f"check prints no JSON:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}") from None
    return Attempt(found, seconds, done.stdout + done.stderr, done.returncode)


def provoke(cluster: Cluster, *faults: Injected) -> Attempt:
    """Bring faults that one size of the check finds about, on one host; check, and undo them."""
    with ExitStack() as undo:
        for fault in faults:
            fault.arrange(cluster)
            undo.callback(fault.heal, cluster)
        return check(cluster, faults[0].size, " ".join(fault.words for fault in faults))


def misses(fault: Injected, attempt: Attempt) -> str:
    """What the check should have said and did not; "" when it found the fault where it was, and nothing where it was not."""
    rows = [row for row in attempt.found["checks"] if row["name"] == fault.check]
    results = [result for row in rows for result in row["results"] if result["host"] == fault.host]
    hits = [r for r in results if r["level"] == fault.level and re.search(fault.says, r["problem"])]
    if not hits:
        return f"{fault.level} {fault.check} on {fault.host} with {fault.says!r}; it says {results}"
    if not all(hit["why"] and hit["cure"] for hit in hits):
        return f"why it matters and what cures it: {hits}"
    others = {
        result["host"]: (row["name"], result["problem"])
        for row in attempt.found["checks"]
        for result in row["results"]
        if result["host"] != fault.host
        and result["level"] in (("red", "yellow") if row["name"] == fault.check else ("red",))
    }
    return f"that the other hosts are sound; it says {others}" if others else ""
