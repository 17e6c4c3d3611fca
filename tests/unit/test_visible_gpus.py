"""Ranks see the GPUs of CUDA_VISIBLE_DEVICES where the run was started, whatever DeepSpeed's launcher puts in their place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from brigade.hosts.job import forwarded
from brigade.hosts.probing import process_environment
from brigade.train.distributed import visible
from brigade.train.host import processes
from brigade.train.host.cluster import World
from testing.ranks import REPOSITORY

DEEPSPEED = World(0, 0, 2, 2, "node1", "deepspeed", 1)
# From a rank upwards: the process that starts ranks, `deepspeed`, and a shell that set a variable of its own meanwhile.
ABOVE = {
    101: "python\0-u\0-m\0deepspeed.launcher.launch\0train.py\0",
    102: "/venv/bin/python\0/venv/bin/deepspeed\0--num_gpus\0002\0train.py\0",
    103: "bash\0",
}


@pytest.fixture
def rank(monkeypatch):
    """rank(given, asked=None, *found): a rank that the launcher gave these GPUs; asked: what `launch` hands on; found: what the
    processes ABOVE it began with. Returns what settle() says, and what the rank sees."""

    def settle(given, asked=None, *found, launcher=visible.BY_DEEPSPEED):
        began = {pid: {} if each is None else {visible.VISIBLE: each} for pid, each in zip(ABOVE, found, strict=False)}
        monkeypatch.setattr(os, "environ", {launcher: "1"})
        variables = {visible.VISIBLE: given, visible.ASKED: asked}
        os.environ |= {name: value for name, value in variables.items() if value is not None}
        monkeypatch.setattr(os, "getppid", lambda: 101)
        monkeypatch.setattr(processes, "parent", lambda pid: pid + 1)
        monkeypatch.setattr(processes, "command", lambda pid: ABOVE.get(pid, "").split("\0"))
        monkeypatch.setattr(processes, "environment", lambda pid: began.get(pid, {}))
        gpus = visible.settle()
        return gpus, os.environ.get(visible.VISIBLE)

    return settle


@pytest.mark.parametrize("given, asked", [
    ("0,1", "2,3"),
    ("0,1", "2,3,4,5"),  # more than ranks
    ("0,1", "3,2"),
    ("0,1", "GPU-8932f937-d72c,GPU-45cc"),
    ("0", "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"),
    ("0", "MIG-GPU-8932f937/1/0"),
    ("0,1", "0000:3b:00.0,0000:af:00.0"),
    ("0,1", ""),  # a CPU
    ("0,1", "-1"),
    (None, "2,3"),
])  # fmt: skip
def test_what_launch_hands_on_is_what_a_rank_sees(rank, capsys, given, asked):
    gpus, sees = rank(given, asked)
    assert sees == asked and visible.ASKED not in os.environ, "a rehearsal on the CPU starts further processes"
    visible.check(gpus, DEEPSPEED)
    assert (f"CUDA_VISIBLE_DEVICES={asked} " in capsys.readouterr().out) == bool(visible.entries(asked))


@pytest.mark.parametrize("given, found, sees, says", [
    ("0,1", (), "0,1", ""),
    ("2,3", (None, "2,3"), "2,3", "use 2, 3"),  # without a flag DeepSpeed takes the list
    ("0,1", (None, "0,1,2,3,4,5,6,7"), "0,1", "use 0, 1"),  # --num_gpus of a list that a scheduler has set
    ("4,5", (None, "0,1,2,3,4,5,6,7"), "4,5", "use 4, 5"),  # --include
    ("1,0", ("0,1",), "1,0", "use 1, 0"),
    ("0,1", (None, ""), "", ""),  # who asks for a CPU gets one
    ("0,1", (None, "-1"), "-1", ""),
    ("0,1", (None, None, "2,3"), "0,1", ""),  # a shell's, which `deepspeed` did not inherit
    ("0,1", (None, "2,3"), "", "refused"),  # --num_gpus 2
    ("0,1", ("2,3", "2,3"), "", "refused"),  # a hostfile
    ("0,1", ("2,3", None), "", "refused"),  # on a further host, of its own
    ("0,1,2", (None, "0,1"), "", "refused"),
    ("0,1", (None, "GPU-8932f937,GPU-45cc"), "", "refused"),  # nothing compares a number with a name
    ("0", (None, "MIG-c6d4f1ef"), "", "refused"),
    ("0,1", (None, "0,-1,1"), "", "refused"),  # CUDA takes the list as far as -1
])  # fmt: skip
def test_who_types_deepspeed_is_told_which_gpus_are_used_and_others_are_refused(
    rank, capsys, given, found, sees, says, user_error
):
    gpus, seen = rank(given, None, *found)
    assert seen == sees, "a rank that is refused takes no GPU"
    if says == "refused":
        refused = user_error(visible.check, gpus, DEEPSPEED)
        words = str(refused)
        asked = next(each for each in reversed(found) if each is not None)
        assert f"CUDA_VISIBLE_DEVICES={asked} asks" in words and f"gave GPUs {given}" in words and "torchrun" in words
    else:
        visible.check(gpus, DEEPSPEED)
        assert says in (said := capsys.readouterr().out) and bool(says) == bool(said)


def test_other_launchers_keep_the_variable(rank):
    assert rank("0,1", None, "2,3", launcher="TORCHELASTIC_RUN_ID") == (visible.Gpus(), "0,1")


def test_a_program_of_ones_own_sees_them_before_it_calls_main(rank):
    """`launch --script`: the program may use a GPU at once. main() finds nothing handed on then, and says the same."""
    rank("0,1", "2,3")
    os.environ[visible.ASKED] = "2,3"
    assert visible.restore() == "2,3" == os.environ[visible.VISIBLE]
    gpus, sees = rank("2,3", None, None, "2,3")
    assert (sees, gpus.others, visible.restore()) == ("2,3", [], None)


def test_a_process_of_a_run_is_told_what_was_asked_for_here_or_by_its_host(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    assert visible.ASKED not in process_environment({}, "run")
    assert process_environment({visible.VISIBLE: ""}, "run")[visible.ASKED] == ""
    os.environ[visible.VISIBLE] = "4,5"
    assert process_environment({}, "run")[visible.ASKED] == "4,5"
    assert process_environment({visible.VISIBLE: "2,3"}, "run")[visible.ASKED] == "2,3"
    assert not forwarded({visible.ASKED: "6,7"}, []), "of an earlier run"


def test_a_process_keeps_what_it_began_with(monkeypatch):
    began = processes.environment(os.getpid())
    monkeypatch.setenv("PATH", "changed")
    assert began["PATH"] == processes.environment(os.getpid())["PATH"] != "changed"
    assert "python" in processes.command(os.getpid())[0] and processes.parent(os.getpid()) == os.getppid()


def test_of_a_process_that_is_gone_nothing_is_known():
    gone = 2**22 + 1
    assert (processes.parent(gone), processes.command(gone), processes.environment(gone)) == (0, [], None)


@pytest.mark.parametrize(
    ("asked", "words"), [("4,5", "BRIGADE_VISIBLE_DEVICES='4,5' "), ("", "BRIGADE_VISIBLE_DEVICES='' "), (None, "")]
)
def test_the_demo_trains_on_the_gpus_that_are_asked_for(asked, words):
    environment = {name: value for name, value in os.environ.items() if name != visible.VISIBLE}
    environment |= {} if asked is None else {visible.VISIBLE: asked}
    command = ["make", "--dry-run", "demo", "BIN=true", "DEMO_RANKS=2", "DEMO_BF16=True"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert f"\n{words}true/deepspeed --num_gpus 2 train.py" in done.stdout.replace("\n ", "\n")


SHOW = """\
import os, sys
sys.path.insert(0, {root!r})
from brigade.train.distributed import visible
gpus = visible.settle()
print(f"rank {{os.environ['RANK']}} sees {{os.environ.get('CUDA_VISIBLE_DEVICES')!r}}, others {{gpus.others}}")
"""


@pytest.mark.slow  # each start of DeepSpeed's launcher imports torch
@pytest.mark.parametrize("variables, words, said", [
    ({visible.VISIBLE: "2,3"}, ["--hostfile"], "sees '', others ['0', '1']"),
    ({visible.VISIBLE: "2,3", visible.ASKED: "2,3"}, ["--hostfile"], "sees '2,3', others []"),
    ({visible.VISIBLE: "2,3"}, ["--num_gpus", "2"], "sees '', others ['0', '1']"),
    ({visible.VISIBLE: "2,3", visible.ASKED: "2,3"}, ["--num_gpus", "2"], "sees '2,3', others []"),
    ({visible.VISIBLE: "0,1,2,3"}, ["--num_gpus", "2"], "sees '0,1', others []"),
    ({visible.VISIBLE: ""}, ["--num_gpus", "2"], "sees '', others []"),
])  # fmt: skip
def test_deepspeeds_launcher_itself(tmp_path, variables, words, said):
    (tmp_path / "hosts").write_text("here slots=2\n")
    (tmp_path / "show.py").write_text(SHOW.format(root=str(REPOSITORY)))
    if words == ["--hostfile"]:
        words = ["--hostfile", str(tmp_path / "hosts"), "--no_ssh", "--node_rank", "0", "--master_addr", "127.0.0.1"]
    command = [str(Path(sys.executable).parent / "deepspeed"), *words, str(tmp_path / "show.py")]
    environment = {name: value for name, value in os.environ.items() if name != visible.VISIBLE} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout.count(said) == 2, done.stdout + done.stderr
