"""`python -m brigade top` on two hosts: a rank that is slow, then stopped, and then its host is lost."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from testbed.faults import INJECTED
from testing.clusters import launch_words

PATIENCE = 240.0  # seconds on a busy machine


def test_top_marks_a_slow_rank_a_stopped_rank_and_a_lost_host(cluster):
    folder = cluster.shared / f"top-{time.monotonic_ns()}"
    folder.mkdir()
    run, hostfile = folder / "run", cluster.hostfile(1)
    train = "--logging_steps 1 --max_train_samples 100 --max_eval_samples 2 --eval_answers 0 --max_steps 5000 --save_steps null"
    train += " --eval_steps 5000 --report_page false --launcher torchrun --no_check --silence 600"
    fault = {"PYTHONPATH": str(INJECTED), "BRIGADE_TEST_FAULT": "slow-forward", "OMP_NUM_THREADS": "1"}
    with (folder / "said").open("wb") as out:
        launched = cluster["node1"].popen(
            launch_words(hostfile, folder, *train.split()), stdout=out, stderr=out, **fault
        )

    def top(*flags):
        done = cluster["node1"].run([sys.executable, "-m", "brigade", "top", *flags], COLUMNS="160", timeout=90)
        return done.stdout

    def until(pattern):
        deadline = time.monotonic() + PATIENCE
        while not re.search(pattern, said := top(str(run), "--every", "6") if (run / "run.yaml").exists() else ""):
            assert time.monotonic() < deadline and launched.poll() is None, said + (folder / "said").read_text()[-3000:]
            time.sleep(1)
        return said

    try:
        said = until(r"\n +1 +\d+ .*SLOWEST")
        assert re.search(r"rank 1 on node2 is slow, score 0\.\d+", said)
        assert not re.search(r"\n +0 +\d+ .*SLOWEST", said)
        assert re.search(r"node1 .* [kM]?B/s", said) and re.search(r"node2 .*GiB", said)
        said = until(r"\n +0 +\d+ +\w+ +[\d,]+ +\d+ ")  # its speed and its use of the processor

        beat = json.loads((run / "heartbeats/rank-1.json").read_text())
        here = [pid for pid in cluster["node2"].processes() if own_number(pid) == beat["pid"]]
        os.kill(here[0], signal.SIGSTOP)
        said = until(r"\n +1 +\d+ .*STOPPED")
        assert "rank 1 on node2 has been stopped (SIGSTOP, or a debugger)" in said
        hosts_alone = top("--hostfile", str(hostfile))
        assert "node2" in hosts_alone and "2 hosts" in hosts_alone

        cluster["node2"].power_off()
        said = until(r"node2 .*LOST")
        assert re.search(r"\n +1 +\d+ .*host lost", said) and re.search(r"\n +0 +\d+ ", said)
    finally:
        cluster["node1"].kill()
        launched.wait(30)


def own_number(pid):
    """A process's number on its own host."""
    return int(re.search(r"NSpid:.*\s(\d+)\n", Path(f"/proc/{pid}/status").read_text())[1])
