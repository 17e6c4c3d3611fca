"""What `check` measures with torch: two ranks on this machine, with gloo, as one host's and as two hosts'."""

import json
import subprocess
import sys
from contextlib import contextmanager

from brigade.check import sweep
from brigade.check.probes import collectives
from brigade.check.probes import pairs as network

ORDER = {"world": 2, "address": "127.0.0.1", "interface": "lo", "backend": "gloo", "longest": 5.0}


@contextmanager
def port():
    serving = network.serve("token")
    try:
        yield next(serving)["free"]
    finally:
        serving.close()


def is_whole(facts):
    """Every collective over every payload that is not too long."""
    assert facts["error"] == ""
    assert facts["device"] == "CPU"
    assert [row[:2] for row in facts["figures"]] == [
        [name, payload] for name in sweep.BUS for payload in (2**12, 2**16)
    ]
    assert all(0 < row[2] < 60 for row in facts["figures"])


def test_two_hosts_sweep_and_send_to_each_other():
    hosts = []
    with port() as free:
        for number in (0, 1):
            more = {"first": number, "ranks": 1, "port": free, "payloads": [2**12, 2**16, 2**40]}
            arguments = ORDER | more | {"games": sweep.rounds(2, 10)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            hosts.append(subprocess.Popen([sys.executable, "-m", "brigade.hosts.probe"], **pipes))
            hosts[-1].stdin.write(
                json.dumps({"probe": "check.probes.collectives.sweep", "arguments": arguments}) + "\n"
            )
            hosts[-1].stdin.flush()
        try:
            answers = [json.loads(host.stdout.readline()) for host in hosts]
        finally:
            for host in hosts:
                host.kill()
                host.communicate()
    for number, facts in enumerate(answers):
        is_whole(facts)
        ((sender, gbit),) = facts["received"]
        assert sender == 1 - number
        assert gbit > 0


def test_two_ranks_of_one_host():
    with port() as free:
        is_whole(collectives.sweep(first=0, ranks=2, port=free, payloads=[2**12, 2**16, 2**40], **ORDER))


def test_what_failed_is_said_and_nothing_hangs(monkeypatch):
    monkeypatch.setattr(collectives, "MEET", 0.5)
    found = collectives.sweep(first=0, ranks=1, port=0, payloads=[2**12], **ORDER)
    assert found["figures"] == []
    assert "rank 1" in found["error"] or "imeout" in found["error"]
