"""Attempts of one launch run what was launched, and a file `stop` ends them in good order, whenever it comes."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from brigade.errors import UserError
from brigade.hosts import rendezvous
from brigade.hosts.job import make
from brigade.launch import background, restarts
from brigade.launch.policy import Policy
from brigade.launch.restarts import Restarts
from brigade.launch.status_and_logs import Output
from brigade.launch.supervisor import TRY_LATER, Launch, Options
from brigade.train.recipe import files as recipe_files
from brigade.train.recipe import flags


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A recipe of a user's own, with an accelerate config that names a ds_config, a hostfile and a loss."""
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path / "cache"))
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


def test_a_program_of_ones_own_that_changes_while_the_run_goes_on_is_said_and_not_started(project):
    job = make("mine.yaml", [], None, script="program.py")
    run = Restarts(job, Options("torchrun", {}), project / "logs", Policy(1), lambda hosts: job)
    for change in (lambda: (project / "program.py").write_text("after"), (project / "program.py").unlink):
        change()
        with pytest.raises(UserError) as caught:
            asyncio.run(run._find_hosts())
        assert caught.value.place == "program.py" and "it changed while the run went on" in str(caught.value)
        assert "goes on from the newest checkpoint" in caught.value.cure


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
        return SimpleNamespace(
            host=host, ranks=range(1), slots=1, ask=ask, tell=lambda *_, **__: None, close=nothing, **more
        )

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
