"""The fake GPU (testing/fake_gpu/) refuses what CUDA and NCCL refuse, counts waits, and computes what the CPU does."""

import os
import socket
import subprocess
import sys

import pytest

from testing import fake_gpu
from testing.ranks import REPOSITORY


def start(*arguments: object) -> subprocess.Popen[str]:
    # Some programs ask first whether torch is there.
    code = "import importlib.util, runpy; importlib.util.find_spec('torch'); runpy._run_module_as_main('testing.fake_gpu_proof')"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | fake_gpu.environment(2),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_operators_run_on_one_device_and_waits_are_counted():
    said = (process := start()).communicate()[0]
    assert process.returncode == 0, said


@pytest.mark.parametrize("devices, said", [((0, 1), "[3.0, 3.0, 3.0]"), ((0, 0), "Duplicate GPU detected")])
def test_nccl_takes_device_tensors_of_different_gpus(devices, said):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [start(port, rank, device) for rank, device in enumerate(devices)]
    outputs = [process.communicate()[0] for process in ranks]
    assert all(said in output for output in outputs), outputs
