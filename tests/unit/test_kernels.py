"""The cache of compiled kernels: its own for each virtual environment, and never locked by a process that is gone; and what a
host needs to compile them."""

import importlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import cpuinfo
import pytest
from torch.utils.file_baton import FileBaton

from brigade.train.engines import deepspeed_needs
from brigade.train.strategy.strategy import Strategy
from brigade.train.upstream import deepspeed_kernels as kernels
from testing.ranks import REPOSITORY


@pytest.fixture
def lock(tmp_path: Path, monkeypatch) -> Path:
    """Where torch locks a kernel; its locks are guarded for one test."""
    for name in ("try_acquire", "release"):
        monkeypatch.setattr(FileBaton, name, getattr(FileBaton, name))
    kernels.end_locks_with_their_holder()
    return tmp_path / "lock"


def kill_holder(lock: Path) -> None:
    """Another process takes the lock, and is killed; while it lives nobody else gets it."""
    ready, taken = os.pipe()
    child = os.fork()
    if not child:
        FileBaton(lock).try_acquire()
        os.write(taken, b".")
        signal.pause()
    try:
        os.read(ready, 1)
        assert not FileBaton(lock).try_acquire()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert lock.exists()


def test_a_killed_holders_lock_is_taken_over_and_a_live_ones_is_not(lock):
    kill_holder(lock)
    baton = FileBaton(lock)
    assert baton.try_acquire() and lock.exists()
    baton.release()
    assert not lock.exists()


def test_a_lock_that_is_gone_at_its_release_crashes_nobody(lock):
    baton = FileBaton(lock)
    assert baton.try_acquire()
    lock.unlink()
    baton.release()


@pytest.mark.parametrize("whose", ["torch's own", "another host's"])
def test_where_nobody_can_tell_only_an_old_lock_goes(lock, whose, monkeypatch):
    if whose == "torch's own":  # of a process that does not guard its locks
        lock.touch()
    else:
        kill_holder(lock)
        monkeypatch.setattr(kernels, "LOCAL", set())
    assert not FileBaton(lock).try_acquire()
    long_ago = time.time() - 2 * 3600 * kernels.HOURS
    os.utime(lock, (long_ago, long_ago))
    assert FileBaton(lock).try_acquire()


def test_each_virtual_environment_has_its_own_cache(monkeypatch, tmp_path):
    tmp_path = tmp_path.resolve()
    (tmp_path / "environment").mkdir()
    (tmp_path / "link").symlink_to("environment")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/somewhere")
    assert kernels.cache() == Path("/somewhere")  # the user's word
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    assert kernels.cache() == tmp_path / "environment" / "torch_extensions"
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(kernels.cache())  # for torch, and for the ranks
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "link"))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    assert kernels.cache().resolve().parent == tmp_path / "environment" / "torch_extensions", "the names differ"


def test_the_cpu_is_looked_at_once_whoever_asks_and_however_often(monkeypatch):
    """DeepSpeed's builders of kernels and its optimizers on the CPU: py-cpuinfo computes for a second at each question."""
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    looked, look = [], cpuinfo.cpuinfo.get_cpu_info_json
    monkeypatch.setattr(cpuinfo.cpuinfo, "get_cpu_info_json", lambda: looked.append(1) or look())
    for _ in range(2):
        kernels.ask_cpu_once()
        assert CPUAdamBuilder().cpu_arch().startswith("-m") and CPUAdamBuilder().simd_width().startswith("-D__")
        assert cpuinfo.get_cpu_info()["arch"] and cpuinfo.get_cpu_info() is not cpuinfo.get_cpu_info()
    assert len(looked) == 1


def test_the_ninja_beside_the_interpreter_is_taken_before_a_systems(monkeypatch, tmp_path):
    system = tmp_path / "ninja"
    system.write_text("")
    system.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    kernels.find()
    assert Path(shutil.which("ninja")).parent == Path(sys.executable).parent
    before = os.environ["PATH"]
    kernels.find()
    assert os.environ["PATH"] == before


def strategy(ds_config: str, **of_zero: object) -> Strategy:
    content = json.loads((REPOSITORY / "ds_configs" / ds_config).read_text())
    content["zero_optimization"] |= of_zero
    return Strategy("zero3", ds_config, ds_config, ds_config=content)


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("ds_config, cuda", [
    ("zero2_offload", False), ("zero3_offload_param", False), ("zero3_nvme", True), ("zeropp", True),
])  # fmt: skip
def test_a_cuda_toolkit_is_wanted_only_for_kernels_of_cuda(monkeypatch, tmp_path, ds_config, cuda, gpu):
    """The optimizer of offloaded states is the CPU's own kernel on every host (deepspeed/accelerator/cuda_accelerator.py:385)."""
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lacking = [problem for problem, _ in deepspeed_needs.lacking(strategy(f"{ds_config}.json"), gpu)]
    assert any("nvcc" in problem for problem in lacking) == (cuda and gpu)


@pytest.mark.parametrize("offload", [{}, {"offload_optimizer": {"device": "none"}}])
@pytest.mark.parametrize("ds_config", ["zero1", "zero2", "zero3", "zero3_hpz"])
def test_without_offload_no_host_needs_a_compiler(monkeypatch, tmp_path, ds_config, offload):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/proc/nowhere")
    assert list(deepspeed_needs.lacking(strategy(f"{ds_config}.json", **offload), gpu=False)) == []
    assert deepspeed_needs.uncompiled(strategy(f"{ds_config}.json", **offload)) == []
    kernels.without_shared_memory()
    assert importlib.import_module("deepspeed.comm.torch").build_shm_op() is None


def test_kernels_that_a_run_will_compile_are_named_once(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert deepspeed_needs.uncompiled(strategy("zero3_nvme.json")) == ["cpu_adam", "async_io"]
    assert deepspeed_needs.uncompiled(strategy("zero3.json")) == []
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam/cpu_adam.so").touch()
    assert deepspeed_needs.uncompiled(strategy("zero2_offload.json")) == []
    monkeypatch.setitem(importlib.import_module("deepspeed.git_version_info").installed_ops, "async_io", True)
    assert deepspeed_needs.uncompiled(strategy("zero3_nvme.json")) == []


def test_the_offloaded_optimizer_is_the_same_kernel_on_hosts_with_gpus():
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    builder = CUDA_Accelerator().create_op_builder("CPUAdamBuilder")
    assert not isinstance(builder, CUDAOpBuilder) and not any(path.endswith(".cu") for path in builder.sources())
