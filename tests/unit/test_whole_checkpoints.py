"""Which checkpoints get their name and which are removed, where a host does not see what another one wrote."""

import errno
import os
from types import SimpleNamespace

import pytest

from brigade.errors import UserError
from brigade.train.checkpoint import manifest, saving
from brigade.train.host.cluster import World
from brigade.train.run import directory as runs
from brigade.train.run import events, mark, on_disk

RECIPE = SimpleNamespace(training=SimpleNamespace(async_save=False, save_total_limit=2))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of one rank whose claim is made; its checkpoints are a file each, and state."""
    monkeypatch.setattr(saving, "SEEN", 0.05)
    monkeypatch.setattr(mark, "PATIENCE", 0.05)
    directory = tmp_path / "mounted" / "run"
    directory.mkdir(parents=True)
    (directory / runs.RECORD).write_text("run: {}\n")
    (directory / mark.FILE).write_text("token")
    strategy = SimpleNamespace(replicas=1)
    world = World(rank=0, local_rank=0, size=1, local_size=1, host="node1", launcher="python")
    return runs.Run(SimpleNamespace(recipe=RECIPE), strategy, world, None, "", directory, mark="token", replica=world)


def write(folder):
    (folder / on_disk.STATE).write_text("{}")
    (folder / "rng_state_0.pth").write_bytes(b"numbers")


def names(run):
    return sorted(path.name for path in run.directory.glob("checkpoint-*"))


def test_a_file_that_is_not_seen_costs_this_checkpoint_and_none_before_it(run, monkeypatch, mistake):
    """Its host wrote it to another directory of the same path: an empty one, which an unmounted file system leaves behind."""
    checkpoints = saving.Saving(run)
    for step in (2, 4):
        checkpoints.save(step, write, {}, None)
    bring = saving._bring

    def elsewhere(source, target):
        written = bring(source, target)
        if target.name.startswith("rng_state"):
            target.unlink()
        return written

    monkeypatch.setattr(saving, "_bring", elsewhere)
    for step in (6, 8):
        assert "rng_state_0.pth, which rank 0 on node1 wrote, is missing as node1 sees" in mistake(
            checkpoints.save, step, write, {}, None
        )
        checkpoints._job = checkpoints._thread = None
    assert names(run) == ["checkpoint-2", "checkpoint-4"]
    assert all(manifest.flaw(run.directory / name) is None for name in names(run))
    monkeypatch.setattr(saving, "_bring", bring)
    checkpoints.save(8, write, {}, None)
    assert names(run) == ["checkpoint-4", "checkpoint-8"]


def test_a_best_checkpoint_that_is_not_whole_does_not_count_among_those_to_keep(run):
    checkpoints = saving.Saving(run)
    for step in (2, 4):
        checkpoints.save(step, write, {}, None)
    best = run.directory / "checkpoint-2"
    (best / "rng_state_0.pth").unlink()
    checkpoints.save(6, write, {}, best)
    assert names(run) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize("left", ["nothing", "an empty directory", "another run's"])
def test_nothing_is_made_or_written_where_the_directory_was(run, left):
    """Neither by a checkpoint, nor by an event, nor for the model at the end."""
    checkpoints = saving.Saving(run)
    checkpoints.save(2, write, {}, None)
    run.directory.parent.rename(run.directory.parent.with_name("away"))
    if left != "nothing":
        run.directory.mkdir(parents=True)
    if left == "another run's":
        (run.directory / mark.FILE).write_text("another token")
    before = sorted(run.directory.parents[1].rglob("*"))
    for writing in (lambda: checkpoints.save(4, write, {}, None), run.check_directory):
        with pytest.raises(UserError, match="on node1 this is no longer the directory that the run began in") as error:
            writing()
        assert "mounted on node1" in error.value.cure
    events.add(run.directory, "step", step=4)
    assert sorted(run.directory.parents[1].rglob("*")) == before


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOTCONN])
def test_a_directory_that_a_file_system_does_not_show_costs_an_event_and_not_the_run(run, monkeypatch, code):
    """`Path.is_file` swallows ENOENT alone."""

    def stat(*_, **__):
        raise OSError(code, "")

    monkeypatch.setattr(os, "stat", stat)
    events.add(run.directory, "step", step=4)
    monkeypatch.undo()
    assert not (run.directory / events.FILE).exists()


@pytest.mark.parametrize(
    ("expected", "room", "first"), [(100, 1000, "memory"), (1001, 1000, "disk"), (0, 1000, "disk"), (100, 0, "disk")]
)
def test_the_first_checkpoint_goes_through_memory_too_where_its_size_has_a_bound(
    run, monkeypatch, expected, room, first
):
    monkeypatch.setattr(RECIPE.training, "async_save", True)
    monkeypatch.setattr(saving.memory_stage, "room", lambda: room)
    checkpoints = saving.Saving(run, expected)
    for step in (2, 4):
        checkpoints.save(step, write, {}, None)
    checkpoints.wait()
    through = [entry["through"] for entry in events.read(run.directory) if entry["event"] == "checkpoint"]
    assert through == [first, "memory" if room else "disk"]


def test_whole_checkpoints_are_listed_newest_first_by_the_steps_of_their_manifests(tmp_path):
    """A directory of another strategy named its oldest checkpoint as the one to continue from."""
    for name, step in {"checkpoint-4": 4, "checkpoint-6": 6, "checkpoint-12": 4, "checkpoint-9": 10}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / on_disk.STATE).write_text(f'{{"global_step": {step}}}')
    (tmp_path / "checkpoint-20").mkdir()
    found = on_disk.whole_checkpoints(tmp_path)
    assert [(step, path.name) for step, path in found.items()] == [
        (10, "checkpoint-9"),
        (6, "checkpoint-6"),
        (4, "checkpoint-4"),
    ]
