"""The fake GPU (testing/fake_gpu/) refuses what CUDA and NCCL refuse, counts waits, and computes what the CPU does."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from testing import fake_gpu
from testing.fake_gpu import cuda_part
from testing.fake_gpu.build import SOURCES, _compile
from testing.ranks import REPOSITORY


@pytest.fixture(scope="module")
def outputs():
    """What the two processes of testing/fake_gpu_proof.py print: each start imports torch."""
    # Some programs ask first whether torch is there.
    code = "import importlib.util, runpy; importlib.util.find_spec('torch'); runpy._run_module_as_main('testing.fake_gpu_proof')"
    environment = os.environ | fake_gpu.environment(2, "t4")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(free.getsockname()[1]) for free in (one, other)]
    commands = [[sys.executable, "-c", code, rank, *ports] for rank in "01"]
    ranks = [subprocess.Popen(command, cwd=REPOSITORY, env=environment, **pipes) for command in commands]
    return [process.communicate()[0] for process in ranks]


def test_another_checkout_does_not_compile_the_device_again(tmp_path, monkeypatch):
    """The paths of torch's headers were a part of the objects' names."""
    begun = []

    def compiled(command, **_):
        begun.append(command[-1])
        Path(command[-1]).touch()
        return SimpleNamespace(communicate=lambda: ("", ""), returncode=0)

    monkeypatch.setattr(subprocess, "Popen", compiled)
    found = [_compile(tmp_path / checkout / "torch", tmp_path) for checkout in ("one", "two")]
    assert found[0] == found[1] and len(begun) == len(SOURCES)


def test_in_a_build_for_cuda_the_device_has_what_torch_looks_for_in_its_cuda_part(tmp_path):
    """And nothing else of it. Here C stands for the libraries of torch."""
    assert not cuda_part.is_in(tmp_path)
    (tmp_path / "lib").mkdir()
    for name, source in {
        "python": "void launch(void); void share(void); void print(void) { launch(); share(); }",
        "cuda": "void launch(void) {} void unused(void) {}",
        "nvshmem": "void share(void) {}",
    }.items():
        command = ["gcc", "-shared", "-xc", "-", "-o", str(tmp_path / f"lib/libtorch_{name}.so")]
        subprocess.run(command, input=source, text=True, check=True)
    assert cuda_part.is_in(tmp_path)
    written = cuda_part.write(tmp_path, tmp_path).read_text()
    assert re.findall(r"void (\w+)\(\) \{ lacks", written) == ["launch", "share"]


def test_operators_run_on_one_device_and_waits_are_counted(outputs):
    assert "operators and attention hold" in outputs[0], outputs[0]


@pytest.mark.parametrize("devices, said", [((0, 1), "[3.0, 3.0, 3.0]"), ((0, 0), "Duplicate GPU detected")])
def test_nccl_takes_device_tensors_of_different_gpus(outputs, devices, said):
    for output in outputs:
        (line,) = (line for line in output.splitlines() if line.startswith(f"devices {devices}:"))
        assert said in line, output
