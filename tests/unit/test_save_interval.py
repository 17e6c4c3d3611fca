"""One process saves checkpoints: what is kept and removed, what a failure leaves, and how often saving pays."""

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
from brigade.train.run import on_disk
from brigade.train.step import save_interval
from brigade.train.strategy import Strategy


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
            made.save(step, lambda folder: write(folder, step), {"step": step}, best)

        return made, save

    return make


def write(folder, step):
    (folder / "optimizer_0").mkdir()
    (folder / "optimizer_0" / "shard").write_bytes(bytes([step]) * 1000)
    (folder / on_disk.STATE).write_text("{}")


def names(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_the_newest_whole_checkpoint_and_the_best_one_stay(saver, tmp_path):
    made, save = saver(limit=1)
    for step in (2, 4, 6):
        save(step, best=tmp_path / "checkpoint-2")
    made.wait()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-6"] and not (tmp_path / on_disk.SAVING).exists()
    made, save = saver(limit=2)
    (tmp_path / "checkpoint-6" / "optimizer_0" / "shard").unlink()
    save(8)
    made.wait()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-8"], "a damaged one takes no whole one's place"
    save(4)  # of steps that were gone back over
    made.wait()
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-8"]
    assert all(manifest.flaw(path) is manifest.damage(path) is None for path in on_disk.checkpoints(tmp_path))


def test_training_goes_on_while_files_are_written_and_waits_before_the_next(saver, tmp_path, monkeypatch):
    made, save = saver()
    save(2)
    made.wait()
    release, sync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (release.wait(), sync(number)))
    save(4)
    made.check()
    assert names(tmp_path) == ["checkpoint-2"] and manifest.flaw(tmp_path / "checkpoint-2") is None
    threading.Timer(0.05, release.set).start()
    save(6)
    assert names(tmp_path)[:2] == ["checkpoint-2", "checkpoint-4"]
    made.wait()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


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
    assert names(tmp_path) == ["checkpoint-2"]
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
    assert names(tmp_path) == ["checkpoint-2"] and manifest.damage(tmp_path / "checkpoint-2") is None


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
