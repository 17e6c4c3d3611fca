"""Launches that start again: whole ones on hosts of which testbed/stand_in/ssh takes the place, and what is asked of hosts."""

import asyncio
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from brigade.errors import UserError
from brigade.hosts import hearing, host_facts, rendezvous
from brigade.hosts.host_facts import RUN, progress
from brigade.hosts.job import make
from brigade.launch import background, restarts
from brigade.launch.first_failure import Failure
from brigade.launch.policy import Policy, check, check_memory
from brigade.launch.restarts import Restarts
from brigade.launch.status_and_logs import Output
from brigade.launch.supervisor import TRY_LATER, Launch, Options
from brigade.train.recipe import files as recipe_files
from brigade.train.recipe import flags
from testing import marks
from testing.launches import talk


# ---- silence -----------------------------------------------------------------------------------------------------
def test_time_in_which_one_was_stopped_itself_is_no_silence(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(hearing.time, "monotonic", lambda: now[0])
    end = hearing.Hearing()
    for _ in range(10):
        now[0] += 1
        end.seconds()
    assert end.seconds() == 10
    now[0] += 3600  # suspended
    assert end.seconds() == 10
    now[0] += 4
    assert end.seconds() == 14
    end.hear()
    assert end.seconds() == 0


# ---- whole launches ----------------------------------------------------------------------------------------------
RESTART = ("--restarts", "2", "--restart_pause", "0")
KILLED = json.dumps({"is": "rank", "rank": 1, "exit": -9})


def test_a_launch_restarts_until_the_same_exception_comes_twice(launch_there, tmp_path):
    told = json.dumps({"is": "rank", "rank": 1, "told": "Traceback\nValueError: bad row", "code": 1})
    done = launch_there(2, *RESTART, STAND_IN_NODE2_SAYS=told)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("error: node2, rank 1 failed first") == 2
    assert "no restart: the same exception twice" in done.stderr
    story = done.stderr.split("time line of 2 attempts:\n")[1]
    assert re.findall(r"attempt (\d) on node1, node2", story) == ["1", "2"]
    assert "node2, rank 1 failed first: ValueError: bad row" in story
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"attempt-1", "attempt-2"}


def test_a_launch_takes_a_spare_for_a_host_whose_rank_was_killed(launch_there):
    done = launch_there(2, *RESTART, "--spare", "node3", STAND_IN_NODE2_SAYS=KILLED, STAND_IN_FAILS="1")
    assert done.returncode == 0, done.stderr
    assert "attempt 2 on node1, node3" in done.stderr
    assert re.search(r"succeeded\n  lost: \d+ s between attempts\n$", done.stderr)


def test_a_users_mistake_ends_all_at_once(launch_there):
    told = json.dumps({"is": "rank", "rank": 1, "told": "error on node2, rank 1 of 2: flag --max_steps", "code": 2})
    done = launch_there(2, *RESTART, STAND_IN_NODE2_SAYS=told)
    assert done.returncode == 2 and "attempt 2" not in done.stderr, done.stderr
    assert "a mistake that somebody has to correct" in done.stderr


UNHEARD = {
    "a full disk": (">/dev/full 2>&1", RESTART, "attempt-2/rank-0-*.log"),
    "a reader who leaves": ("2> >(head -n 1 >/dev/null)", RESTART, "attempt-2/rank-0-*.log"),
    "elastic": ("2>/dev/full", ("--elastic", "--sync_every", "1"), "replica-1/attempt-1/rank-0-*.log"),
}


@pytest.mark.parametrize("name", marks.cases("a full disk", slow=["a reader who leaves", "elastic"]))
def test_a_launch_whose_own_words_nobody_can_hear_goes_on(launch_there, tmp_path, name):
    redirect, words, logs = UNHEARD[name]
    done = launch_there(2, *words, redirect=redirect, STAND_IN_NODE2_SAYS=KILLED, STAND_IN_FAILS="1")
    assert done.returncode == 0 and not done.stderr and list((tmp_path / "logs").glob(logs))


def test_a_later_attempt_whose_logs_cannot_be_written_goes_on_without_them(tmp_path, monkeypatch, capsys, mistake):
    (tmp_path / "file").touch()
    stat = os.stat

    def away(path, *words, **more):  # a mount whose server is gone
        if str(path).startswith(f"{tmp_path}/file/"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return stat(path, *words, **more)

    monkeypatch.setattr(os, "stat", away)
    assert "no log can be written" in mistake(Output(["node1"], tmp_path / "file" / "logs").__enter__)
    with Output(["node1"], tmp_path / "file" / "logs", needed=False) as output:
        output.keep("rank-0-node1", "words")
    assert capsys.readouterr().err.count("output is lost from here on: [Errno") == 1


# ---- what was lost -----------------------------------------------------------------------------------------------
TENTH = {"started": "1", "step": 10, "checkpoint": 10}
LOST = {  # what is known after the first host was lost; logging_steps; what is said of steps; the last whole step by the ranks
    "outputs local to each host": ({"checkpoint": 10, "by_first": False}, 1, None),
    "a shared output": ({"started": "1", "step": 13, "checkpoint": 10, "by_first": False}, 1, "lost: 3 steps, and"),
    "every tenth step on record": (TENTH, 10, "lost: 0 to 9 steps, and"),
    "it never trained": ({"by_first": True}, 1, "lost: 0 steps, and"),
    "a full disk: nothing is logged": (TENTH, 1, "lost: 5 steps, and", 15),
    "the ranks' word for what is not logged": (TENTH, 10, "lost: 5 steps, and", 15),
    "no events at all": ({"checkpoint": 10}, 1, "lost: 5 steps, and", 15),
}


@pytest.mark.parametrize("name", LOST)
def test_the_count_of_lost_steps_is_true_or_not_said(hostfile, tmp_path, monkeypatch, capfd, name):
    after, every, said, *done = LOST[name]
    monkeypatch.chdir(tmp_path)
    channel = SimpleNamespace(host="node2", hello={}, stopped=True)
    failures = [Failure(0.0, "lost", "node1", text="nothing heard of it")]
    judge = SimpleNamespace(failures=failures, met=lambda: True, done=done[0] if done else None)
    attempts = [
        SimpleNamespace(code=1, judge=judge, after=after),
        SimpleNamespace(code=0, judge=judge, after={"started": "2", "step": 20, "first": 10, "by_first": True}),
    ]
    for one in attempts:
        one.name, one.channels, one.started, one.stop_signal, one.before = "run", [channel], True, 0, {}
        one.run = lambda one=one: asyncio.sleep(0, one.code)
    monkeypatch.setattr(restarts, "Launch", lambda *_: attempts.pop(0))
    monkeypatch.setattr(restarts.Restarts, "_find_hosts", lambda self: asyncio.sleep(0, True))
    job = make("recipes/tiny/full.yaml", ["--logging_steps", str(every)], hostfile(node1=1, node2=1))
    run = restarts.Restarts(job, Options("torchrun", {}), tmp_path / "logs", Policy(1, pause=0), lambda hosts: job)
    assert asyncio.run(run.run()) == 0
    told = capfd.readouterr().err.split("time line of 2 attempts:")[1]
    assert said in told if said else "step" not in told.partition("lost: ")[2], told


AT_FAULT = {
    "its own": ({"whose": "host"}, ("--min_hosts", "1"), 0, "attempt 2 on node1\n"),
    "another's": ({"whose": "host", "hosts": ["node1"]}, ("--min_hosts", "1"), 0, "attempt 2 on node2\n"),
    "passing": ({"whose": "passing"}, (), 0, "attempt 2 on node1, node2\n"),
    "no other host": ({"whose": "host"}, (), 2, "no restart: node2 is at fault, and no other host may take its place"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_FAULT)
def test_a_launch_goes_on_as_an_error_says_whose_it_is(launch_there, name):
    says, words, code, expected = AT_FAULT[name]
    error = "error on node2, rank 1 of 2: out\n  none there\n  cure: mount it"
    told = {"is": "rank", "rank": 1, "told": error, "code": 2}
    done = launch_there(2, *RESTART, *words, STAND_IN_NODE2_SAYS=json.dumps(told | says), STAND_IN_FAILS="1")
    assert done.returncode == code and expected in done.stderr, done.stderr


def test_code_that_changes_on_all_hosts_between_attempts_is_said_once_and_not_trained_with(launch_there, tmp_path):
    (tmp_path / "code").write_text("first")
    done = launch_there(2, *RESTART, STAND_IN_NODE2_SAYS=KILLED, STAND_IN_CODE=str(tmp_path / "code"))
    story = done.stderr.split("time line of 1 attempt:\n")[1]
    problem = "the clones of all hosts: train.py or brigade/ changed while the run went on (first, now pulled)"
    assert done.returncode == 1 and story.count("pulled") == 1 and f"no restart: {problem}" in story, done.stderr
    assert "cure: the same command goes on from the newest checkpoint" in done.stderr and "left out" not in done.stderr


# ---- what is asked of hosts --------------------------------------------------------------------------------------
def test_what_restarts_cannot_keep_is_refused(hostfile, mistake):
    for words, policy, part in (
        ([], Policy(0, spares=("node3",)), "add --restarts"),
        ([], Policy(2, spares=("node1",)), "in the hostfile already"),
        ([], Policy(2, min_hosts=3), "more than the 2"),
        (["--fresh"], Policy(2), "each start of the job would begin anew"),
    ):
        job = make("recipes/tiny/full.yaml", words, hostfile(node1=1, node2=1))
        assert part in mistake(check, job, policy)


def test_a_smaller_cluster_that_cannot_hold_the_model_is_refused(hostfile, mistake):
    words = ["--ds_config", "ds_configs/zero3.json", "--per_device_train_batch_size", "1"]
    check_memory(make("recipes/llama-3.1-70b/full.yaml", words, hostfile(**{f"node{n}": 8 for n in range(8)})))
    small = make("recipes/llama-3.1-70b/full.yaml", words, hostfile(node1=8))
    message = mistake(check_memory, small)
    assert "1 host" in message and "GiB on each H100" in message


def test_an_agent_leaves_when_it_hears_nothing_for_as_long_as_it_was_told():
    lines, _ = talk({"do": "beat", "patience": 0.5}, seconds=3)
    assert {"is": "leaving", "why": "its agent heard nothing from launch for 0 s"} in lines


def test_an_agent_clears_its_host_of_earlier_runs_and_says_how_far_they_came(tmp_path):
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / "trainer_state.json").touch()
    (tmp_path / "checkpoint-40").mkdir()  # was being written
    (tmp_path / "events.jsonl").write_text('{"event": "step", "step": 38}\n{"event": "fault", "what": "x"}\n{"ev')
    token = f"test-{time.monotonic_ns()}"
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={RUN: token})
    orders = {"do": "clean", "runs": [token]}, {"do": "progress", "directory": str(tmp_path)}
    lines, _ = talk(*(order | {"id": number} for number, order in enumerate(orders)), seconds=1.5)
    assert left.wait(5) == -signal.SIGKILL
    answers = {line["id"]: line for line in lines if line["is"] == "answer"}
    assert answers[0] == {"is": "answer", "id": 0}
    assert (answers[1]["step"], answers[1]["checkpoint"]) == (38, 20) and "finished" not in answers[1]
    (tmp_path / "success.json").write_text("{}")
    assert progress(tmp_path)["finished"]


@pytest.mark.slow  # imports torch
def test_devices_that_a_host_lists_and_torch_does_not_see_are_a_fault(monkeypatch):
    monkeypatch.setattr(host_facts, "gpus", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert host_facts.devices_fail() == "torch sees 0 of its 1 GPUs"
    monkeypatch.setattr(host_facts, "gpus", lambda: 0)
    assert host_facts.devices_fail() == ""
    monkeypatch.setattr(host_facts, "gpus", lambda: 4)
    assert host_facts.devices_fail("2,3") == "torch sees 0 of its 2 GPUs"
    assert host_facts.devices_fail("") == "", "who asks for a CPU needs no GPU"


@pytest.mark.parametrize(
    ("before", "after", "succeeded"), [("old", "new", True), ("old", "old", False), (None, None, False)]
)
def test_a_run_whose_line_was_lost_at_its_end_is_judged_by_its_marker(hostfile, tmp_path, before, after, succeeded):
    job = make("recipes/tiny/full.yaml", [], hostfile(node1=1))
    launch = Launch(job, Options("torchrun", {}), Output(["node1"], tmp_path))

    async def ask(*_, **__):
        return {"finished": after} if after else {}

    (channel,) = launch.channels = [SimpleNamespace(host="node1", ranks=range(1), transport=["false"], ask=ask)]
    channel.open, channel.stopped, channel.tell = True, True, lambda *_, **__: None
    launch.started, launch.before = True, {"finished": before} if before else {}
    launch.judge.failures = [Failure(0.0, "lost", "node1", text="nothing heard of it")]
    asyncio.run(launch._stop(0))
    assert launch.succeeded == succeeded


# ---- what was launched -----------------------------------------------------------------------------------------------
@pytest.fixture
def project(tmp_path, monkeypatch, own_cache):
    """A recipe of a user's own, with an accelerate config that names a ds_config, a hostfile and a loss."""
    monkeypatch.chdir(tmp_path)
    tiny = recipe_files.read_yaml(recipe_files.DEFAULT_RECIPE)
    tiny["cluster"] = {"hostfile": "hosts", "accelerate_config": "zero.yaml"}
    (tmp_path / "mine.yaml").write_text(json.dumps(tiny))
    zero = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    (tmp_path / "zero.yaml").write_text(json.dumps(zero))
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    (tmp_path / "program.py").write_text("before")
    return tmp_path


@pytest.mark.parametrize("change", ["edited", "broken", "moved away"])
def test_what_a_launch_has_read_holds_for_all_its_attempts(project, change, mistake):
    read = ("mine.yaml", "zero.yaml", "ds.json", "hosts")
    ask = lambda: make("mine.yaml", ["--max_steps", "7"], None)  # noqa: E731
    launched = ask()

    def work() -> int:
        for name in read:
            file = project / name
            text = file.read_text().replace('"stage": 2', '"stage": 3').replace("node2", "node3")
            text = "{" if change == "broken" else text.replace('"seed": 1234', '"seed": 7')
            file.write_text(text) if change != "moved away" else file.unlink()
        assert ask() == launched
        assert flags.load(["--recipe", "mine.yaml", "--max_steps", "7"]) == launched.settings, "as each rank reads it"
        return 0

    assert background.run(work, project / "logs", launched, detach=False) == 0
    if change == "edited":
        again = ask()
        assert again != launched and again.strategy.kind == "zero3" and list(again.hosts) == ["node1", "node3"]
    else:
        mistake(ask)


def test_a_program_of_ones_own_that_changes_while_the_run_goes_on_is_said_and_not_started(project, user_error):
    job = make("mine.yaml", [], None, script="program.py")
    run = Restarts(job, Options("torchrun", {}), project / "logs", Policy(1), lambda hosts: job)
    for change in (lambda: (project / "program.py").write_text("after"), (project / "program.py").unlink):
        change()
        caught = user_error(asyncio.run, run._find_hosts())
        assert caught.place == "program.py" and "it changed while the run went on" in str(caught)
        assert "goes on from the newest checkpoint" in caught.cure


@pytest.fixture
def launch_with(project, monkeypatch):
    """Launch an attempt on hosts that answer everything at once. told: how far the run in its output directory is"""

    async def nothing(*_, **__):
        pass

    for name in ("connect", "check_files"):
        monkeypatch.setattr(rendezvous, name, nothing)
    monkeypatch.setattr(rendezvous, "check_alike", lambda *_: None)
    monkeypatch.setattr(rendezvous, "find", lambda *_: pytest.fail("it must not start"))

    def channel(host, told):
        ask = lambda *_, **__: asyncio.sleep(0, told)  # noqa: E731
        silence = SimpleNamespace(seconds=lambda: 0.0)
        more = {"open": False, "stopped": True, "hello": {}, "hearing": silence, "patience": 60.0}
        known = {"host": host, "ranks": range(1), "slots": 1, "ask": ask}
        return SimpleNamespace(**known, tell=lambda *_, **__: None, close=nothing, **more)

    def attempt(number, told):
        job = make("mine.yaml", [], None)
        launch = Launch(job, Options("torchrun", {}), Output(list(job.hosts), project / "logs"), number)
        launch.channels = [channel(host, told) for host in job.hosts]
        launch.judge.channels = launch.channels
        return launch

    return attempt


def test_a_file_stop_that_comes_between_two_attempts_is_a_stop_and_no_mistake_of_a_rank(
    launch_with, project, monkeypatch, mistake
):
    """It ended a run with exit code 2 and `node1, rank 0 failed first`."""
    told = {"checkpoint": 4, "step": 5, "started": "1", "stop": True}
    first, later = launch_with(1, told), launch_with(2, told)
    assert "this file stops the run as soon as it trains" in mistake(lambda: asyncio.run(first.run()))
    said = []
    monkeypatch.setattr(later, "_say", said.append)
    monkeypatch.setattr(restarts, "Launch", lambda *_: later)
    run = Restarts(later.job, Options("torchrun", {}), project / "logs", Policy(3), lambda hosts: later.job)
    run.runs.append("attempt 1")
    assert asyncio.run(run._attempt()) == (TRY_LATER, None)
    assert run.story[-1].endswith("stopped by the file stop") and not run.begun
    assert "/stop, which has to be removed first; the same command goes on" in said[-1]


def test_a_file_stop_beside_a_finished_run_keeps_nobody_from_hearing_that(launch_with, monkeypatch, mistake):
    monkeypatch.setattr(rendezvous, "find", lambda *_: (_ for _ in ()).throw(UserError("a run", "it goes on", "wait")))
    assert "it goes on" in mistake(lambda: asyncio.run(launch_with(1, {"stop": True, "finished": "then"}).run()))
