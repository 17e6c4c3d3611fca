"""Launches of which this test process is the user, and an agent that takes orders."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]

CACHE = tempfile.TemporaryDirectory()  # of launches

SECRET = "hf_neverInAFileOrOnACommandLine"


def launch(*words, open_files=4096, **variables):
    limited = ["bash", "-c", 'ulimit -n "$0" && exec "$@"', str(open_files)]
    command = [*limited, sys.executable, "-m", "brigade", "launch", *words]
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "BRIGADE_CACHE": CACHE.name} | variables
    return subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60)


def talk(*orders, seconds=5.0):
    """What an agent of this host says to these orders until it has ended."""
    agent = subprocess.Popen(
        [sys.executable, "-m", "brigade.launch.agent"],
        cwd=REPOSITORY,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    for order in orders:
        agent.stdin.write(json.dumps(order) + "\n")
        agent.stdin.flush()
    time.sleep(seconds)
    begun = time.monotonic()
    out, _ = agent.communicate(timeout=30)
    lines = [json.loads(line.removeprefix("brigade> ")) for line in out.splitlines() if line]
    return lines, time.monotonic() - begun
