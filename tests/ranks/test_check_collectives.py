"""What `check` measures with torch: two ranks on this machine, with gloo, as one host's and as two hosts'."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from brigade.check import sweep
from brigade.check.probes import collectives
from brigade.check.probes import pairs as network
from testing import fake_gpu

ORDER = {"world": 2, "address": "127.0.0.1", "interface": "lo", "backend": "gloo", "longest": 5.0, "limit": 90}


@contextmanager
def port():
    serving = network.serve("token")
    try:
        yield next(serving)["free"]
    finally:
        serving.close()


def is_whole(facts, device="CPU"):
    """Every collective over every payload that is not too long."""
    assert facts["error"] == ""
    assert facts["device"] == device
    assert [row[:2] for row in facts["figures"]] == [
        [name, payload] for name in sweep.BUS for payload in (2**12, 2**16)
    ]
    assert all(0 < row[2] < 60 for row in facts["figures"])


@pytest.mark.slow
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


@pytest.mark.slow
def test_two_ranks_of_one_host_sweep_their_gpus():
    """By NCCL, on fake GPUs (testing/fake_gpu/)."""
    with port() as free:
        arguments = ORDER | {"backend": "nccl", "first": 0, "ranks": 2, "port": free, "payloads": [2**12, 2**16, 2**40]}
        asked = json.dumps({"probe": "check.probes.collectives.sweep", "arguments": arguments}) + "\n"
        command, env = [sys.executable, "-m", "brigade.hosts.probe"], os.environ | fake_gpu.environment(2)
        done = subprocess.run(command, input=asked, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr[-3000:]
    is_whole(json.loads(done.stdout), "NVIDIA H100 80GB HBM3")


def test_what_failed_is_said_and_nothing_hangs(monkeypatch):
    monkeypatch.setattr(collectives, "MEET", 0.5)
    found = collectives.sweep(first=0, ranks=1, port=0, payloads=[2**12], **ORDER)
    assert found["figures"] == []
    assert "rank 1" in found["error"] or "imeout" in found["error"]


def test_a_rank_that_is_killed_is_named_and_the_sweep_ends(monkeypatch):
    """multiprocessing's Pool waits for ever for the answer of a worker that is gone."""
    monkeypatch.setattr(collectives, "SETTLE", 0.1)
    started = []

    class Struck(collectives._Worker):
        def __init__(self, rank, local, how):
            super().__init__(rank, local, how)
            started.append(self)
            if local == 1:
                self.process.kill()

    monkeypatch.setattr(collectives, "_Worker", Struck)
    with port() as free:
        found = collectives.sweep(first=0, ranks=2, port=free, payloads=[2**12], **ORDER)
    assert found["ended"] == found["error"] == "process 1: its process was ended by SIGKILL"
    assert not any(worker.process.is_alive() for worker in started)


PATIENCE = 2.0  # seconds, of the ranks below


def play(pipe, rank, local, how):
    """Act as a rank that times out, and as the one that it waits for, which does what how.address says."""
    act = how.address if local else "waits"
    if act != "is late":
        pipe.send(collectives.HERE)
        if how.address != "is late":
            pipe.send(collectives.MET)
    if act == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if act == "fails":
        pipe.send({"figures": [], "received": [], "device": "", "error": "CUDA error: uncorrectable ECC error"})
        return
    if act == "waits" and how.address != "is late":  # NCCL's watchdog
        time.sleep(2 * PATIENCE)
        os.kill(os.getpid(), signal.SIGABRT)
    time.sleep(600)


@pytest.mark.parametrize("act, limit, ended, error", [
    ("dies", 60, "GPU 1: its process was ended by SIGSEGV", "GPU 1: its process was ended by SIGSEGV"),
    pytest.param("fails", 60, "", "GPU 1: CUDA error: uncorrectable ECC error", marks=pytest.mark.slow),
    pytest.param("hangs", 60, "GPU 1: it still ran 7 s after GPU 0 had failed", "", marks=pytest.mark.slow),
    pytest.param("is late", 8, "GPU 1: it did not end within 8 s", "", marks=pytest.mark.slow),
])  # fmt: skip
def test_who_is_at_fault_and_who_only_waited(monkeypatch, act, limit, ended, error):
    monkeypatch.setattr(collectives, "_tell_rank", play)
    how = collectives.How(2, act, 0, "lo", "nccl", [], 1.0, 2)
    workers = [collectives._Worker(local, local, how) for local in range(2)]
    assert collectives._watch(workers, limit, PATIENCE) == (ended, error or ended)
    assert workers[1].answer["error"] == (error or ended)
    assert not any(worker.process.is_alive() for worker in workers)


@pytest.mark.parametrize("says, ended, error", [
    ({0: None, 1: "ECC error"}, "", "GPU 1: ECC error"),
    ({0: "ECC error", 1: None}, "", "GPU 0: ECC error"),
    ({0: "ECC error", 1: ""}, "", "GPU 0: ECC error"),
    ({0: "", 1: ""}, "", ""),
    ({0: "", 1: EOFError}, *["GPU 1: its process is ending and does not end"] * 2),
])  # fmt: skip
def test_the_first_that_failed_speaks_for_its_host_though_no_process_can_be_ended(monkeypatch, says, ended, error):
    """A GPU that fell off the bus leaves its processes in the kernel, where SIGKILL does not reach them."""
    waiting = []

    class Stuck:
        exitcode = None

        def __init__(self, target, args, daemon):
            self.pipe, _, self.local, _ = args

        def start(self):
            words = says[self.local]
            if words is None:
                waiting.append(os.dup(self.pipe.fileno()))
            elif words is not EOFError:
                self.pipe.send({"figures": [], "received": [], "device": "H100", "error": words})

        def kill(self):
            pass

        def join(self, timeout=None):
            assert timeout is not None, "it would wait for ever"

    monkeypatch.setattr(multiprocessing.get_context("spawn"), "Process", Stuck)
    monkeypatch.setattr(collectives, "SETTLE", 0.1)
    monkeypatch.setattr(collectives, "GRACE", 0.1)
    order = ORDER | {"first": 0, "ranks": 2, "port": 0, "payloads": [], "backend": "nccl"}
    found = collectives.sweep(**order)
    for end in waiting:
        os.close(end)
    assert (found["ended"], found["error"]) == (ended, error)
