"""What `check` measures with torch: two hosts of two ranks each on this machine, with gloo."""

import json
import subprocess
import sys

import pytest

from brigade.check import sweep
from brigade.check.probes import collectives, network

ORDER = {"ranks": 2, "world": 4, "address": "127.0.0.1", "interface": "lo", "backend": "gloo", "longest": 5.0}


@pytest.fixture(scope="module")
def swept():
    """What each host answers."""
    serving = network.serve("token")
    more = {"port": next(serving)["free"], "payloads": [2**12, 2**16, 2**40], "games": sweep.rounds(2, 10)}
    hosts = []
    for first in (0, 2):
        order = {"probe": "collectives.sweep", "arguments": ORDER | more | {"first": first}}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        hosts.append(subprocess.Popen([sys.executable, "-m", "brigade.check.probe"], **pipes))
        hosts[-1].stdin.write(json.dumps(order) + "\n")
        hosts[-1].stdin.flush()
    try:
        yield [json.loads(host.stdout.readline()) for host in hosts]
    finally:
        serving.close()
        for host in hosts:
            host.kill()
            host.communicate()


def test_every_collective_over_every_payload_that_is_not_too_long(swept):
    for facts in swept:
        assert facts["error"] == ""
        assert facts["device"] == "CPU"
        expected = [[name, payload] for name in sweep.BUS for payload in (2**12, 2**16)]
        assert [row[:2] for row in facts["figures"]] == expected
        assert all(0 < row[2] < 60 for row in facts["figures"])


def test_each_host_received_from_its_partner(swept):
    for number, facts in enumerate(swept):
        ((sender, gbit),) = facts["received"]
        assert sender == 1 - number
        assert gbit > 0


def test_what_failed_is_said_and_nothing_hangs(monkeypatch):
    monkeypatch.setattr(collectives, "MEET", 0.5)
    found = collectives.sweep(0, 1, 2, "127.0.0.1", 0, "lo", "gloo", [2**12], 5.0)
    assert found["figures"] == []
    assert "rank 1" in found["error"] or "imeout" in found["error"]
