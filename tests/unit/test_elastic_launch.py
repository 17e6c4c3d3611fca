"""What `launch --elastic` refuses, and what the replicas of a run that it starts know of each other."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest

from brigade.launch import elastic
from brigade.launch.elastic import Elastic
from brigade.train.host.cluster import ELASTIC, world_from_environment
from brigade.train.recipe import flags
from brigade.train.recipe.files import LAUNCHED
from testing.command_line import brigade

RECIPE = "recipes/tiny/full.yaml"
GOOD = ["--sync_every", "5"]
TWO = "node1 slots=1\nnode2 slots=1\n"
REFUSED = {
    "no synchronisation": ([], TWO, ["flag --elastic", "sync_every", "--restarts"]),
    "one host": ([*GOOD, "--sync_replica", "rank"], "node1 slots=2\n", ["flag --elastic", "only one host"]),
    "fresh": ([*GOOD, "--fresh"], TWO, ["flag --fresh", "--output_dir"]),
    "quantised states": ([*GOOD, "--optim", "adamw_8bit"], TWO, ["flag --optim", "adamw_8bit", "adamw_torch"]),
    "spares": ([*GOOD, "--spare", "node3"], TWO, ["flag --spare", "leave it out"]),
    "a job file": ([*GOOD, "--write", "sbatch"], TWO, ["flag --write", "leave it out"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_elastic_is_refused_with_a_cure(name, tmp_path):
    flags, hosts, words = REFUSED[name]
    (tmp_path / "hostfile").write_text(hosts)
    done = brigade("launch", RECIPE, "--hostfile", tmp_path / "hostfile", "--elastic", *flags)
    assert done.returncode == 2 and "cure: " in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not [word for word in words if word not in done.stderr], done.stderr


def test_each_replica_is_a_world_of_its_own_and_writes_for_itself():
    told = {"replica": 2, "replicas": 4}
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", ELASTIC: json.dumps(told)}
    world = world_from_environment(ranks)
    assert (world.size, world.replica, world.of_all_replicas, world.number) == (2, 2, 8, 4)
    assert world.is_main_rank and world.part(4).replica == 0


def test_a_run_keeps_its_one_output_directory_from_its_replicas():
    for mine in (["--output_dir", "here"], ["--output-dir=here"]):
        assert flags.load([*mine, "--output_dir", "replica-1"]).directory("ddp").name == "replica-1"


@pytest.mark.parametrize("asked, all_stop", [
    ([("", 0), ("SIGTERM to rank 0", 15), ("", 0)], False),
    ([("SIGTERM to rank 0", 15), ("SIGTERM to rank 0", 15), ("", 0)], True),
    ([("the file stop", 0), ("", 0), ("", 0)], True),
    ([("", 0), ("", 0), ("Ctrl-C", 2)], True),
    ([("SIGTERM to rank 0", 15), ("", 0)], False),
])  # fmt: skip
def test_a_stop_of_one_replica_by_its_own_launch_is_not_the_others(asked, all_stop):
    """A launch whose torchrun was killed ends its rank by SIGTERM; three such ends once stopped a whole run."""
    from brigade.train.local.elastic_steps import ElasticSteps

    said = [({"should_training_stop"} if by else set(), by, number, 0) for by, number in asked]
    judge = ElasticSteps.__new__(ElasticSteps)
    assert all(judge._is_for_all(by, number, said) for _, by, number, _ in said if by) == all_stop
    assert judge._is_for_all("", 0, said)


STOP = object()  # whoever writes the file `stop` does so while this attempt starts
LOST, MISTAKE, TRAINED = 1, 2, "step 1/9\n"


@pytest.mark.parametrize("attempts, code, told", [
    ([[MISTAKE], [MISTAKE]], 2, "no replica can begin"),
    ([[LOST, 0], [LOST, 0]], 0, "attempt 2 of 4"),
    ([[MISTAKE, 0], [LOST, 0]], 0, "ended with exit code 2; attempt 2 of 4"),
    ([[(MISTAKE, TRAINED), 0], [(MISTAKE, TRAINED), 0]], 0, "ended with exit code 2; attempt 2 of 4"),
    ([[(75, TRAINED)], [(75, TRAINED)]], 75, "all replicas were asked to stop"),
    ([[(LOST, TRAINED), (MISTAKE, STOP)], [143]], 75, "all replicas were asked to stop"),
    ([[(LOST, TRAINED)], [(MISTAKE, STOP)]], 75, "all replicas were asked to stop"),
    ([[MISTAKE], [MISTAKE]], 2, "all replicas were asked to stop"),  # the file was there before
])  # fmt: skip
def test_exit_codes_of_replicas_and_a_file_stop_are_told_apart(tmp_path, monkeypatch, attempts, code, told):
    """Replicas that had all trained once ended the run by `no replica can begin`, and a stop between two attempts was 143."""
    job = SimpleNamespace(hosts={"node1": 1, "node2": 1}, output_dir=tmp_path / "run", recipe=RECIPE)
    if "asked" in told and attempts == [[MISTAKE], [MISTAKE]]:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/stop").touch()
    run = Elastic(job, [], tmp_path / "logs", 3, 0.01, {})
    left = {number: list(codes) for number, codes in enumerate(attempts)}

    async def attempt(number, host, which):
        code, what = left[number].pop(0), ""
        if isinstance(code, tuple):
            code, what = code
        run._output(number).mkdir(parents=True, exist_ok=True)
        if what is STOP:
            (run._output(number) / "stop").touch()
        elif what:
            logs = run.directory / f"replica-{number}" / f"attempt-{which}"
            logs.mkdir(parents=True)
            (logs / "rank-0.log").write_text(what)
        if code == 143:  # it trains until it is told
            await run.over.wait()
        return code

    async def coordinate():
        run.up.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(run, "_attempt", attempt)
    monkeypatch.setattr(run, "_coordinate", coordinate)
    assert asyncio.run(run.run()) == code
    assert any(told in line for line in run.story)


def test_a_replica_that_starts_again_runs_what_was_launched(tmp_path, monkeypatch):
    """Its own launch reads the recipe anew, by the record of texts that the launch of all has made."""
    kept, seen = tmp_path / "launched.json", tmp_path / "seen"
    monkeypatch.setenv(LAUNCHED, str(kept))
    program = f"import os, sys; open({str(seen)!r}, 'w').write(os.environ[{LAUNCHED!r}])"
    create = asyncio.create_subprocess_exec
    monkeypatch.setattr(
        elastic.asyncio, "create_subprocess_exec", lambda *_, **how: create(sys.executable, "-c", program, **how)
    )
    job = SimpleNamespace(hosts={"node1": 1, "node2": 1}, output_dir=tmp_path / "run", recipe=RECIPE)
    run = Elastic(job, [], tmp_path / "logs", 3, 0.01, {})
    assert asyncio.run(run._attempt(1, "node2", 2)) == 0
    assert seen.read_text() == str(kept)
