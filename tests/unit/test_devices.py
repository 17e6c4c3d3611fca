"""Drivers that are too old for torch, GPUs that it does not see, and which of them is a rank's."""

import errno
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from brigade.check.checks import NotHere
from brigade.check.run import STOP
from brigade.hosts import host_facts
from brigade.hosts.rendezvous import usable_gpus
from brigade.kernels import auto
from brigade.launch.policy import Fault, would_repeat
from brigade.train.distributed import devices
from brigade.train.engines import deepspeed_needs
from brigade.train.host.cluster import World, world_from_environment
from brigade.train.step import environment as loop_environment
from brigade.train.step import preflight
from brigade.train.strategy import Strategy
from brigade.train.watch import slow_ranks
from testing.gpus import KINDS, STAND_IN, stand_in  # noqa: F401  a fixture
from testing.ranks import REPOSITORY
from testing.same_hosts import LOOK, judged
from testing.strategies import world

H100 = KINDS["h100-sxm"]


@pytest.fixture
def host(stand_in, monkeypatch):  # noqa: F811
    """host("535.129.03", "13.0"): eight GPUs under this driver, of which a torch for that CUDA sees none."""

    def make(driver, cuda, **said):
        monkeypatch.setattr(devices, "VERSION_FILES", ())
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "ACCELERATE_USE_CPU"):
            monkeypatch.delenv(name, raising=False)
        stand_in(H100 | {"driver": driver} | said)

    return make


def test_gpus_that_torch_does_not_see_are_refused_with_the_reason(host, mistake, monkeypatch):
    host("535.129.03", "13.0")
    message = mistake(devices.check, world())
    assert "host host" in message and "8 GPUs" in message and "driver 535.129.03 is too old" in message
    assert "580 or newer" in message and "PyTorch's index cu126" in message and "CUDA_VISIBLE_DEVICES= " in message

    host("580.65.06", None)
    message = mistake(devices.check, world())
    assert "is a build without CUDA" in message and "PyTorch's index cu130" in message

    host("580.65.06", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    monkeypatch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(RuntimeError("No CUDA GPUs are available")))
    message = mistake(devices.check, world())
    assert "CUDA_VISIBLE_DEVICES=9" in message and "No CUDA GPUs are available" in message and "580.65.06" in message


@pytest.mark.parametrize("name, value", [
    ("CUDA_VISIBLE_DEVICES", ""),
    ("CUDA_VISIBLE_DEVICES", "-1"),
    ("DS_ACCELERATOR", "cpu"),
    ("ACCELERATE_USE_CPU", "true"),
    ("ACCELERATE_USE_CPU", "Yes"),
    ("ACCELERATE_USE_CPU", "on"),
])  # fmt: skip
def test_who_asks_for_a_cpu_gets_one(host, monkeypatch, name, value):
    host("535.129.03", "13.0")
    monkeypatch.setenv(name, value)
    devices.check(world())


def test_a_host_without_gpus_and_one_whose_gpus_are_seen_pass(host, monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "NODES", tmp_path)
    host("535.129.03", "13.0", count=0)
    devices.check(world())
    host("535.129.03", "13.0", problem="Driver/library version mismatch")
    devices.check(world())
    host("580.65.06", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    devices.check(world())


def test_only_deepspeed_refuses_to_be_on_the_cpu_beside_torch_on_gpus(load, mistake, monkeypatch):
    """ZeRO-3 would look its samples, which are on a GPU, up in an embedding on the CPU. Others do not ask the variable."""
    sees(monkeypatch, 1)
    monkeypatch.setattr(deepspeed_needs, "lacking", lambda *_: iter(()))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    devices.check(world())
    preflight.check_host(load(), Strategy("ddp", "ddp", "flag"), world())
    zero = Strategy("zero3", "zero3", "flag", ds_config={})
    assert zero.is_deepspeed
    message = mistake(preflight.check_host, load(), zero, world())
    assert "DS_ACCELERATOR=cpu" in message and "unset it" in message and "CUDA_VISIBLE_DEVICES= " in message


def test_where_nvml_fails_the_device_nodes_count(host, mistake, monkeypatch, tmp_path):
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setattr(devices, "NODES", tmp_path)
    host("?", "13.0", problem="Driver/library version mismatch")
    monkeypatch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(RuntimeError("Error 803")))
    message = mistake(devices.check, world())
    assert "2 GPUs" in message and "Error 803" in message and "reboot" in message


def test_gpus_of_other_jobs_do_not_count(host, mistake, monkeypatch, tmp_path):
    """A job for CPUs on a GPU node: NVML and /dev list the node's GPUs, and its control group opens none of them."""
    host("580.65.06", "13.0", others=list(range(8)))
    assert devices.count_by_driver() == 0
    devices.check(world())
    host("580.65.06", "13.0", others=[0, 1], lost=[7])
    assert devices.count_by_driver() == 6, "a lost GPU is this job's"

    for number in range(3):
        (tmp_path / f"nvidia{number}").touch()
    why = {"nvidia0": errno.EPERM, "nvidia1": errno.EIO}

    def opened(node, flags, real=os.open):
        if node.name in why:
            raise OSError(why[node.name], "")
        return real(node, flags)

    monkeypatch.setattr(devices, "NODES", tmp_path)
    monkeypatch.setattr(devices.os, "open", opened)
    monkeypatch.setattr(devices, "_asked_of_nvml", lambda: (None, None, None))
    assert devices.count_by_driver() == 2, "one that answers, and a lost one"


CUDA_LIBRARY = """
extern "C" int cuInit(unsigned) { return ANSWER; }
extern "C" int cuDeviceGetCount(int* count) { *count = 2; return 0; }
"""


@pytest.mark.parametrize("nodes, answer, count", [
    (("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"), None, 2),  # a container with `compute` alone
    (("nvidia5",), None, 1),  # with one of the host's GPUs
    (("nvidiactl",), None, 0),  # with none of them
    (("dxg",), 0, 2),  # WSL, and a container of it
    (("nvhost-gpu", "nvgpu"), 0, 2),  # a Jetson
    (("dxg",), 100, 0),  # WSL on a laptop whose GPU is not NVIDIA's: CUDA_ERROR_NO_DEVICE
    (("dxg",), None, 0),  # and without CUDA's library
    ((), 0, 0),
])  # fmt: skip
def test_gpus_are_counted_without_nvidia_smi_and_without_nvml(monkeypatch, tmp_path, nodes, answer, count):
    """Such hosts were taken for ones without GPUs: torch saw two, and `check` said that ranks compute on the CPU."""
    for name in nodes:
        (tmp_path / name).touch()
    if answer is not None:
        (tmp_path / "cuda.cpp").write_text(CUDA_LIBRARY.replace("ANSWER", str(answer)))
        library = ["g++", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "cuda.cpp")]
        subprocess.run(library, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(host_facts.shutil, "which", lambda name: None)
    monkeypatch.setattr(devices, "NODES", tmp_path)
    monkeypatch.setattr(devices, "_asked_of_nvml", lambda: (None, None, None))
    assert host_facts.gpus() == count


def test_plain_train_py_does_not_train_on_the_cpu_in_silence(tmp_path):
    """The message comes before the output directory, and from one process that nothing launched as well."""
    (tmp_path / "said.yaml").write_text((STAND_IN.parents[2] / "tests/data/nvml/h100-sxm.yaml").read_text())
    of_devices = ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR")
    environment = {key: value for key, value in os.environ.items() if key not in of_devices}
    environment |= {"PYTHONPATH": str(STAND_IN), "STAND_IN_NVML": str(tmp_path / "said.yaml")}
    command = [sys.executable, "train.py", f"--output_dir={tmp_path / 'run'}", "--max_steps=1", "--warmup_steps=0"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "it has 8 GPUs, and torch" in done.stderr and len(done.stderr.strip().splitlines()) <= 4
    assert not (tmp_path / "run").exists()


def test_no_restart_repeats_the_refusal():
    refused = Fault("reported", "its driver is too old", ("node1",), code=2, whose="host", told=True)
    assert "no other host may take its place" in (would_repeat([refused], replaceable=False) or "")
    elsewhere = replace(refused, hosts=("node2",))
    assert "it is no host's own" in (would_repeat([refused, elsewhere]) or "")


# ---- which GPU is a rank's -----------------------------------------------------------------------------------------------
def sees(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])


@pytest.mark.parametrize("count, index", [(0, None), (1, 0), (2, None), (4, 3), (8, 3)])
def test_a_rank_has_the_gpu_of_its_number_or_the_only_one_that_it_sees(monkeypatch, count, index):
    sees(monkeypatch, count)
    assert devices.index(World(3, 3, 4, 4, "host", "torchrun")) == index


@pytest.fixture
def prepared(monkeypatch):
    """prepared(rank, count, **environment): the environment of a rank of four that sees so many GPUs."""

    def make(rank, count, **environment):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
        monkeypatch.setattr(os, "environ", {"PATH": "", "OMP_NUM_THREADS": "1"} | own | environment)
        sees(monkeypatch, count)
        monkeypatch.setattr(loop_environment, "_silence", lambda world: None)
        loop_environment.prepare_environment(world_from_environment(), Strategy("ddp", "ddp", "flag"))
        return dict(os.environ)

    return make


def test_a_run_keeps_fp32_on_every_host(prepared, monkeypatch):
    """NVIDIA's images switch TF32 on by a variable, which torch reads once: set here as it would be then."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        prepared(3, 1)
        assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)


def test_engines_take_the_only_gpu_that_a_rank_sees_and_the_rank_keeps_its_number(prepared):
    """DeepSpeed sets device LOCAL_RANK (runtime/engine.py:1017)."""
    made = prepared(3, 1)
    assert made["LOCAL_RANK"] == "0"
    world = world_from_environment(made)
    assert (world.rank, world.local_rank, world.local_size) == (3, 3, 4)
    assert devices.index(world) == 0
    mpi = prepared(3, 1, OMPI_COMM_WORLD_LOCAL_RANK="3")
    assert mpi["OMPI_COMM_WORLD_LOCAL_RANK"] == mpi["LOCAL_RANK"] == "0"
    assert prepared(3, 4)["LOCAL_RANK"] == "3"


@pytest.mark.parametrize("own, count, says", [
    (("GPU-a", "GPU-b"), 8, ()),
    (("GPU-a", "GPU-a"), 8, ("ranks 0, 1 use the same GPU (UUID GPU-a)", "LOCAL_RANK", "--gpus-per-task")),
    (("GPU-a", "GPU-a"), 1, ("2 ranks on this host, but 1 GPU", "one rank per GPU: --num_gpus, --nproc_per_node")),
])  # fmt: skip
def test_two_ranks_with_the_same_gpu_are_refused(monkeypatch, capsys, own, count, says):
    """NCCL would say "Duplicate GPU detected" in the first collective. count: what the driver counts; they see one"""
    gpus = [("node1", 0, name) for name in own]
    sees(monkeypatch, 1)
    monkeypatch.setattr(devices, "count_by_driver", lambda: count)
    monkeypatch.setattr(devices, "identity", lambda world: gpus[0])
    monkeypatch.setattr(preflight.ranks, "gather", lambda value: gpus if value == gpus[0] else [value])
    two = replace(world(1), local_size=2)
    if not says:
        preflight.check_gpus_differ(two)
        return
    with pytest.raises(SystemExit) as ended:
        preflight.check_gpus_differ(two)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and all(word in said for word in says), said


def test_a_gpu_on_which_cuda_does_not_start_ends_all_ranks_with_one_message(monkeypatch, capsys):
    """It is held by another process (EXCLUSIVE_PROCESS) or lost. Out of agreed() the other ranks wait in gather for this one."""

    def busy(world):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    monkeypatch.setattr(devices, "identity", busy)
    with pytest.raises(SystemExit):
        preflight.check_gpus_differ(world(1))
    assert "busy or unavailable" in capsys.readouterr().err


def test_a_gpu_that_no_second_process_gets_is_named_as_the_reason_that_nothing_is_proven():
    why = "the process that tries it does not start: RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"
    assert "EXCLUSIVE_PROCESS" in auto._held({"paths": {"sdpa": {"status": "failed", "why": why}, "eager": {}}})
    assert auto._held({"paths": {"sdpa": {"status": "failed", "why": "no answer within 8 s"}}}) == ""


def test_a_gpu_without_bf16_is_asked_for_none(load, mistake, monkeypatch):
    """Before Ampere torch emulates it. A run in bf16 is refused, and ranks are compared by products in fp16."""
    sees(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    message = mistake(preflight.check_host, load("--bf16"), Strategy("ddp", "ddp", "flag"), world())
    assert "Tesla T4 has no bf16" in message and "use fp16" in message
    asked = []
    monkeypatch.setattr(slow_ranks, "measured", lambda device, size, dtype: asked.append((device, dtype)) or 1.0)
    assert slow_ranks.seconds_of_a_product() and asked == [("cuda", torch.float16)]


# ---- check -----------------------------------------------------------------------------------------------------------
OLD = {"driver": "535.129.03", "torch": LOOK["torch"] | {"cuda": "13.0"}}
BLIND = {f"node{number}": {"sees": False} for number in (1, 2, 3)}


def rows(*own, gpus=8, sees=BLIND, **environment):
    return judged("driver", *own, gpus=gpus, sees=sees, environment=environment)


def test_check_compares_them_too_and_stops_a_launch():
    (sound,), (red,), (without,) = rows({}, OLD, {"torch": {"cuda": None}}).values()
    assert sound.level == "green" and sound.value == "570.86.15 for CUDA 12.8"
    assert red.level == "red" and "wants 580" in red.problem and "cu126" in red.cure
    assert without.level == "red" and "without CUDA" in without.problem and "cu126" in without.cure
    assert "driver" in STOP


def test_an_old_driver_under_which_torch_sees_gpus_stops_nothing():
    """R535 with the forward compatibility package, as in NVIDIA's containers. A host that does not tell stops nothing either."""
    answers = {"node1": {"sees": True}, "node2": {"sees": False}}
    (compatible,), (red,), (silent,) = rows(OLD, OLD, OLD, sees=answers).values()
    assert (compatible.level, compatible.value) == ("green", "535.129.03 for CUDA 13.0, compatible")
    assert red.level == "red" and silent.level != "red"


@pytest.mark.parametrize("gpus, environment", [
    (8, {"DS_ACCELERATOR": "cpu"}), (8, {"ACCELERATE_USE_CPU": "1"}), (8, {"CUDA_VISIBLE_DEVICES": "-1"}), (0, {}),
])  # fmt: skip
def test_a_run_on_cpus_and_hosts_without_gpus_have_no_row_of_their_driver(gpus, environment):
    with pytest.raises(NotHere):
        rows(OLD, gpus=gpus, **environment)


@pytest.mark.parametrize(
    "visible, count", [(None, 8), ("0,1", 2), ("", 0), ("-1", 0), ("none", 0), ("NoDevFiles", 0), ("0,-1,1", 1)]
)
def test_gpus_that_are_hidden_count_as_none(visible, count):
    assert usable_gpus(8, visible) == count
