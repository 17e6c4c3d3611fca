"""Threads of a rank's work on the CPU: a launcher's 1 is raised, a user's own number stays. Variables that are read once are set
before anything has read them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from brigade.train.distributed import read_once
from brigade.train.distributed.torch_build import Build
from brigade.train.host import control_groups, cpu_threads
from brigade.train.host.cluster import World, world_from_environment
from brigade.train.step import environment as loop_environment
from brigade.train.strategy import Strategy
from testing.ranks import REPOSITORY

# What torchrun and accelerate do where nobody has set the variable.
LAUNCHER = """\
import os, subprocess, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")
subprocess.run([sys.executable, "-c", "from brigade.train.host import cpu_threads; print(cpu_threads.is_chosen())"], check=True)
"""
THROUGH_A_SHELL = LAUNCHER.replace("[sys.executable", "['sh', '-c', '\"$@\"; true', 'sh', sys.executable")


@pytest.mark.parametrize("name, number, words, text, chosen", [
    ("torchrun", None, [], LAUNCHER, False),
    ("torchrun", "1", [], LAUNCHER, True),
    ("torchrun", "4", [], LAUNCHER, True),
    ("torchrun", None, [], THROUGH_A_SHELL, False),  # --no_python wrapper.sh
    ("accelerate", None, ["launch"], LAUNCHER, False),
    ("accelerate", None, ["launch", "--num_cpu_threads_per_process", "1"], LAUNCHER, True),
    ("accelerate", None, ["launch", "--num_cpu_threads_per_process=1"], LAUNCHER, True),
    ("my-own-script", None, [], LAUNCHER, True),  # pytest, a job's script: somebody wrote the 1
])  # fmt: skip
def test_a_launchers_number_is_told_from_a_users(tmp_path, name, number, words, text, chosen):
    (tmp_path / name).write_text(text)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}
    environment |= {} if number is None else {cpu_threads.VARIABLE: number}
    done = subprocess.run(
        [sys.executable, "-S", tmp_path / name, *words], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(chosen)], done.stderr


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(64.0, 8, 8), (3.5, 2, 1), (0.5, 1, 1), (7.0, 1, 7), (2.0, 8, 1)]
)
def test_ranks_share_the_cores_that_they_may_use(monkeypatch, cores, ranks, threads):
    monkeypatch.setattr(control_groups, "cores", lambda: cores)
    assert cpu_threads.share(ranks) == threads


@pytest.mark.parametrize("own, parents, threads", [
    (16, 16, 2),  # a container with 16 of the host's 128 cores, for all ranks
    (16, 128, 16),  # srun has given each rank 16 cores
    (64, 128, 16),  # four ranks are bound to each of two sockets
    (1, 128, 1),
])  # fmt: skip
def test_a_rank_that_is_bound_to_cores_of_its_own_has_those(monkeypatch, own, parents, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(parents if pid else own)))
    monkeypatch.setattr(control_groups, "read", lambda *_: iter(()))
    assert cpu_threads.of_rank(8) == threads


def test_where_nothing_can_be_read_a_number_is_the_users(monkeypatch):
    monkeypatch.setenv(cpu_threads.VARIABLE, "1")
    monkeypatch.setattr(cpu_threads, "_above", lambda _: iter([0]))
    assert cpu_threads.is_chosen()
    monkeypatch.delenv(cpu_threads.VARIABLE)
    assert not cpu_threads.is_chosen()


@pytest.mark.parametrize(("chosen", "threads"), [(False, 3), (True, 1)])
def test_a_rank_takes_its_share_unless_the_user_has_chosen(monkeypatch, chosen, threads):
    taken = [1]
    monkeypatch.setattr("torch.set_num_threads", lambda number: taken.append(number))
    monkeypatch.setattr("torch.get_num_threads", lambda: taken[-1])
    monkeypatch.setattr(control_groups, "cores", lambda: 6.0)
    monkeypatch.setattr(cpu_threads, "is_chosen", lambda: chosen)
    monkeypatch.setattr(loop_environment, "_silence", lambda world: None)
    two = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    monkeypatch.setattr(os, "environ", {"PATH": "", cpu_threads.VARIABLE: "1"} | two)
    loop_environment.prepare_environment(world_from_environment(), Strategy("ddp", "ddp", "flag"))
    assert taken[-1] == threads and os.environ[cpu_threads.VARIABLE] == str(threads)


@pytest.mark.parametrize("way", ["fused", "foreach"])
def test_threads_change_no_bit_of_an_offloaded_step(way):
    """So that a run goes on bit for bit with another share of the cores."""
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((1003, 777), (40_000,), (3,))]
            optimizer = torch.optim.AdamW(weights, weight_decay=0.1, **{way: True})
            for _ in range(2):
                for each in weights:
                    each.grad = torch.randn(each.shape)
                norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
            found.append([norm, *weights])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [
    ["torchrun"], ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"],
])  # fmt: skip
@pytest.mark.parametrize("number", [None, "1"])
def test_the_launchers_themselves_set_the_number_as_is_assumed(launcher, number, tmp_path):
    """torch/distributed/run.py: config_from_args; accelerate/commands/launch.py: _validate_launch_command"""
    (tmp_path / "rank.py").write_text(
        "import os\nfrom brigade.train.host import cpu_threads\n"
        "print(f'{os.environ[cpu_threads.VARIABLE]} {cpu_threads.is_chosen()}\\n', end='')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != cpu_threads.VARIABLE}
    environment |= {"PYTHONPATH": str(REPOSITORY), **({} if number is None else {cpu_threads.VARIABLE: number})}
    program = str(Path(sys.executable).with_name(launcher[0]))
    ranks = ["--standalone", "--nproc_per_node", "2"] if launcher[0] == "torchrun" else []
    command = [program, *launcher[1:], *ranks, str(tmp_path / "rank.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert sorted(done.stdout.splitlines()) == [f"1 {number == '1'}"] * 2, done.stderr


# ---- variables that are read once ------------------------------------------------------------------------------------
GROW = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
HF = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


@pytest.fixture
def prepared(monkeypatch, tmp_path):
    """prepared(rank, kernel, hip, cuda_has_started, **environment): the variables of a rank after that."""

    def make(rank=0, kernel="6.8.0-generic", hip=None, started=False, **environment):
        (tmp_path / "osrelease").write_text(f"{kernel}\n")
        monkeypatch.setattr(read_once, "KERNEL", tmp_path / "osrelease")
        monkeypatch.setattr(read_once.torch_build, "read", lambda: Build(None if hip else "13.0", hip))
        monkeypatch.setattr(sys.modules["torch"].cuda, "is_initialized", lambda: started)
        monkeypatch.setattr(os, "environ", dict(environment))
        read_once.set_variables(World(rank, rank, 2, 2, "host", "torchrun"))
        return dict(os.environ)

    return make


@pytest.mark.parametrize("given, set_then", [
    ({}, GROW),
    ({"rank": 1}, GROW | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}),
    *(({name: own}, {name: own}) for name in read_once.ALLOCATOR for own in ("max_split_size_mb:128", "")),
    ({"kernel": "5.15.167.4-microsoft-standard-WSL2"}, {}),  # the first allocation would fail
    ({"hip": "7.2.0"}, {}),
    ({"started": True}, {}),  # too late: the table of the run would be wrong
])  # fmt: skip
def test_memory_is_taken_in_segments_that_grow_unless_they_cannot_or_the_user_says_otherwise(prepared, given, set_then):
    assert prepared(**given) == HF | set_then


def test_nothing_has_read_them_by_then():
    """What reads them is imported later: test_light_imports.py."""
    story = (REPOSITORY / "train.py").read_text().partition("def main(")[2]
    assert 0 < story.index("read_once.set_variables(world)") < story.index("ranks.agreed(world)")
