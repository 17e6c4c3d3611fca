"""Whatever goes wrong on a cluster, the launch ends within a minute, says on which host and why, and leaves no process on
any host."""

from dataclasses import replace

import pytest

from testbed.faults import FAULTS, misses, provoke
from testing import marks

LIMIT = 60.0  # seconds from the fault to the last process's end, on a busy machine; benchmarks/faults.py measures them
TO_THE_END = 180.0  # where the run starts again and trains to its last step

# In the matrix is what tests/ranks has on one host, and another fault that differs in its place or its moment only.
MATRIX = [
    "checkpoint-truncated", "checkpoint-missing", "checkpoint-of-other-code", "slow-rank", "rank-stopped", "data-sleeps", "nan",
    "raises-among-others", "killed-in-forward", "killed-in-optimizer", "rank-killed", "leaves-with-0", "port-blocked-on-one",
    "disk-full", "host-killed", "link-cut", "link-cut-for-good", "killed-in-loading", "rebooted-unmounted", "data-changed",
    "two-runs", "sigterm-launcher", "sigterm-rank", "sigterm-storm", "sigterm", "ctrl-c", "clocks", "disk-full-saving",
    "no-marker", "read-only", "hangs-at-start", "agent-killed", "launch-killed", "sigterm-rank-twice", "sigterm-storm-on-all",
    "ctrl-c-twice", "link-cut-20s", "wrong-key", "slots", "port-in-use", "deepspeed-killed", "unmounted", "first-host-killed",
    "host-killed-spare", "raises",
]  # fmt: skip
# A second fault that one of the others meets: it has to say of both what it says of each.
ALSO = {"checkpoint-flipped": "clocks"}


@pytest.mark.parametrize("name", marks.cases(*(name for name in FAULTS if name not in MATRIX), matrix=MATRIX))
def test_fault(request, name):
    fault = FAULTS[name]
    if name in ALSO:
        other = FAULTS[ALSO[name]]
        fault = replace(fault, says=(*fault.says, *other.says), arrange=other.arrange, repair=other.repair)
    cluster = request.getfixturevalue("cluster" if fault.hosts == 2 else "cluster_of_three")
    attempt = provoke(cluster, fault)
    if not fault.gone:  # else nobody is left to speak
        assert not misses(fault, attempt), attempt.said
        assert attempt.code == fault.code, attempt.said
        assert "brigade/launch" not in attempt.said, attempt.said  # no traceback of our own
    if "--report_page true" in fault.words:
        text = (attempt.folder / "run" / "report.html").read_text()
        assert 'class="verdict failed"' in text and "killed by signal 9 (SIGKILL)" in text
    if fault.strike:
        assert attempt.seconds < (LIMIT if fault.code else TO_THE_END), attempt.said
