"""Run a module of this repository under torchrun on this host, and leave no process behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def torchrun(module: str, *arguments: str, ranks: int, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` on `ranks` ranks, one thread each; returns exit code and output.

    After `timeout` seconds everything is killed, ranks included, and the exit code is that of SIGKILL: torchrun starts
    each rank in a session of its own, so killing torchrun alone would leave them running.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", module]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=REPOSITORY,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        import psutil

        family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        for pid in family:
            os.kill(pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\nkilled after {timeout:.0f} s"
    return subprocess.CompletedProcess(command, process.returncode, out, err)
