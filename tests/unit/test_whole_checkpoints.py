"""Which checkpoints get their name and which are removed, where a host does not see what another one wrote; what a failure of
saving leaves, and how often saving pays."""

import errno
import math
import os
import threading
from types import SimpleNamespace

import pytest

from brigade.errors import UserError
from brigade.train.checkpoint import manifest, saving
from brigade.train.host.cluster import World
from brigade.train.run import directory as runs
from brigade.train.run import events, mark, on_disk
from brigade.train.step import save_interval
from brigade.train.strategy import Strategy

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


def named(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


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
    assert named(run.directory) == ["checkpoint-2", "checkpoint-4"]
    assert all(manifest.flaw(run.directory / name) is None for name in named(run.directory))
    monkeypatch.setattr(saving, "_bring", bring)
    checkpoints.save(8, write, {}, None)
    assert named(run.directory) == ["checkpoint-4", "checkpoint-8"]


def test_a_best_checkpoint_that_is_not_whole_does_not_count_among_those_to_keep(run):
    checkpoints = saving.Saving(run)
    for step in (2, 4):
        checkpoints.save(step, write, {}, None)
    best = run.directory / "checkpoint-2"
    (best / "rng_state_0.pth").unlink()
    checkpoints.save(6, write, {}, best)
    assert named(run.directory) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


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
    names = [(step, path.name) for step, path in found.items()]
    assert names == [(10, "checkpoint-9"), (6, "checkpoint-6"), (4, "checkpoint-4")]


# ---- how often a checkpoint is written -------------------------------------------------------------------------------
@pytest.fixture
def saver(tmp_path):
    """saver(limit): a Saving in tmp_path that keeps so many checkpoints."""
    (tmp_path / runs.RECORD).write_text("run: {}\n")

    def make(limit=None, async_save=True):
        recipe = SimpleNamespace(training=SimpleNamespace(save_total_limit=limit, async_save=async_save))
        settings, world = SimpleNamespace(recipe=recipe), World(0, 0, 1, 1, "h", "python")
        run = runs.Run(settings, Strategy("single", "single", "flag"), world, None, "", tmp_path)
        made = saving.Saving(run)

        def save(step, best=None):
            made.save(step, lambda folder: write_it(folder, step), {"step": step}, best)

        return made, save

    return make


def write_it(folder, step):
    (folder / "optimizer_0").mkdir()
    (folder / "optimizer_0" / "shard").write_bytes(bytes([step]) * 1000)
    (folder / on_disk.STATE).write_text("{}")


def test_the_newest_whole_checkpoint_and_the_best_one_stay(saver, tmp_path):
    made, save = saver(limit=1)
    for step in (2, 4, 6):
        save(step, best=tmp_path / "checkpoint-2")
    made.wait()
    assert named(tmp_path) == ["checkpoint-2", "checkpoint-6"] and not (tmp_path / on_disk.SAVING).exists()
    made, save = saver(limit=2)
    (tmp_path / "checkpoint-6" / "optimizer_0" / "shard").unlink()
    save(8)
    made.wait()
    assert named(tmp_path) == ["checkpoint-2", "checkpoint-8"], "a damaged one takes no whole one's place"
    save(4)  # of steps that were gone back over
    made.wait()
    assert named(tmp_path) == ["checkpoint-4", "checkpoint-8"]
    assert all(manifest.flaw(path) is manifest.damage(path) is None for path in on_disk.checkpoints(tmp_path))


def test_training_goes_on_while_files_are_written_and_waits_before_the_next(saver, tmp_path, monkeypatch):
    made, save = saver()
    save(2)
    made.wait()
    release, sync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (release.wait(), sync(number)))
    save(4)
    made.check()
    assert named(tmp_path) == ["checkpoint-2"] and manifest.flaw(tmp_path / "checkpoint-2") is None
    threading.Timer(0.05, release.set).start()
    save(6)
    assert named(tmp_path)[:2] == ["checkpoint-2", "checkpoint-4"]
    made.wait()
    assert named(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize("async_save", [True, False])
def test_a_full_disk_ends_the_run_and_leaves_what_was_whole(async_save, saver, tmp_path, monkeypatch):
    made, save = saver(async_save=async_save)
    save(2)
    made.wait()

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(UserError) as caught:
        patched.setattr(os, "fsync", full)
        save(4)
        made.wait()
    assert "checkpoint-4 could not be written by rank 0 on h" in caught.value.problem
    assert "No space left" in caught.value.problem and str(tmp_path) == caught.value.place
    assert named(tmp_path) == ["checkpoint-2"]
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats/rank-3.json").touch()  # of more ranks than there are now
    (tmp_path / "heartbeats/rank-3.stacks").touch()
    on_disk.remove_leftovers(tmp_path)
    assert not (tmp_path / on_disk.SAVING).exists()
    assert [path.name for path in (tmp_path / "heartbeats").iterdir()] == ["rank-3.stacks"]


def test_a_checkpoint_that_was_about_to_be_replaced_has_its_name_again(saver, tmp_path, monkeypatch):
    made, save = saver()
    save(2)
    made.wait()
    (tmp_path / on_disk.SAVING).mkdir()
    (tmp_path / "checkpoint-2").rename(tmp_path / on_disk.SAVING / f"checkpoint-2{on_disk.REPLACED}")
    on_disk.remove_leftovers(tmp_path)
    assert named(tmp_path) == ["checkpoint-2"] and manifest.damage(tmp_path / "checkpoint-2") is None


def test_the_interval_is_young_and_dalys_and_an_hour_at_most():
    assert save_interval.best_interval(cost=2.0, mttf=10_000.0) == pytest.approx(200.0)
    assert save_interval.best_interval(cost=30.0, mttf=50_700 * 3600 / 16_384) == pytest.approx(
        math.sqrt(2 * 30 * 50_700 * 3600 / 16_384)
    )  # 817 s on the cluster that the default comes from
    assert save_interval.best_interval(cost=1.0, mttf=1e12) == save_interval.LONGEST


def test_save_steps_auto_asks_first_early_and_then_by_what_it_measured(capsys):
    training = SimpleNamespace(load_best_model_at_end=True, early_stopping_patience=None, eval_steps=4)
    recipe = SimpleNamespace(training=training, cluster=SimpleNamespace(gpu_mttf_hours=4.0))
    run = SimpleNamespace(
        settings=SimpleNamespace(recipe=recipe),
        world=World(0, 0, 2, 2, "h", "torchrun"),  # of a replica
        strategy=SimpleNamespace(replicas=2),
    )
    callback = save_interval.SaveInterval(run, blocked=lambda: 0.5)
    state = SimpleNamespace(global_step=0, max_steps=10**9, is_world_process_zero=True)
    callback.on_train_begin(None, state, None)
    asked = []
    for step in range(1, 150):
        state.global_step, control = step, SimpleNamespace(should_save=False)
        callback.on_step_begin(None, state, control)
        callback.began -= 1.0  # a step takes a second
        callback.on_step_end(None, state, control)
        if control.should_save:
            asked.append(step)
            callback.on_save(None, state, control)
    assert asked == [12, 72, 132], "sqrt(2 * 0.5 s * 3600 s) = 60 steps, and each at an evaluation"
    said = capsys.readouterr().out
    assert said.count("save_steps auto: a checkpoint costs 0.5 s") == 1 and "of 4 ranks one fails" in said
