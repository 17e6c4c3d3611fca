"""Whether data, output and clocks are what a run on several hosts needs."""

import time
from collections.abc import AsyncIterator

from .hosts import Hosts
from .registry import check
from .results import Result, sound, thresholds


@check("clock")
async def clock(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads each host's clock, half the round trip later. Threshold: clock_offset of thresholds.yaml."""
    before = time.time()
    facts = await hosts.ask("storage.clock")
    offsets = {host: found["time"] - before for host, found in facts.items()}
    middle = sorted(offsets.values())[len(offsets) // 2] if offsets else 0.0
    for host, offset in offsets.items():
        away = offset - middle
        level = thresholds()["clock_offset"].level(abs(away))
        if level == "green":
            yield sound(host, f"{away:+.1f} s", away)
            continue
        problem = f"its clock is {abs(away):.1f} s {'ahead' if away > 0 else 'behind'}"
        why = "the newest checkpoint is found by its time, and logs of two hosts cannot be compared"
        cure = f"ssh {host} 'sudo chronyc makestep', or `sudo timedatectl set-ntp true`"
        yield Result(host, level, f"{away:+.1f} s", away, problem, why, cure)
