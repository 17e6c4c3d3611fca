"""Launches of which this test process is the user, and an agent that takes orders."""

import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress

from .command_line import brigade
from .ranks import REPOSITORY

CACHE = tempfile.TemporaryDirectory()  # of launches

SECRET = "hf_neverInAFileOrOnACommandLine"


def launch_here(*words, **variables):
    """Return how a launch ends that starts nothing, within this process."""
    return brigade("launch", *words, PATH="/usr/bin:/bin", HOME="/nowhere", BRIGADE_CACHE=CACHE.name, **variables)


def launch(*words, open_files=4096, redirect="", **variables):
    limited = ["bash", "-c", f'ulimit -n "$0" && exec "$@" {redirect}', str(open_files)]
    command = [*limited, sys.executable, "-m", "brigade", "launch", *words]
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "BRIGADE_CACHE": CACHE.name} | variables
    return subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60)


def talk(*orders, seconds=5.0, stderr=None):
    """What an agent of this host says to these orders until it has ended. An order that is a number is a
    signal, sent once the agent's launcher has printed something."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    agent = subprocess.Popen([sys.executable, "-m", "brigade.hosts.agent"], cwd=REPOSITORY, **pipes)
    said = ""
    for order in orders:
        if isinstance(order, int):
            while '"launcher"' not in said:
                said += agent.stdout.readline()
            agent.send_signal(order)
            time.sleep(0.3)
            continue
        agent.stdin.write(json.dumps(order) + "\n")
        agent.stdin.flush()
    with suppress(subprocess.TimeoutExpired):
        agent.wait(seconds)  # some leave by themselves
    begun = time.monotonic()
    with suppress(BrokenPipeError):  # it has left
        agent.stdin.close()
    said += agent.stdout.read()
    agent.wait(30)
    lines = [json.loads(line.removeprefix("brigade> ")) for line in said.splitlines() if line]
    return lines, time.monotonic() - begun
