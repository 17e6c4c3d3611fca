"""A checkpoint is whole or absent, whatever interrupts its saving; the run goes on from the one before it."""

import shutil
from pathlib import Path

import pytest

from brigade.train.checkpoint import manifest
from brigade.train.run import events
from testing import marks, runs
from testing.parity import STRATEGIES
from testing.ranks import run_ranks
from testing.run_files import losses_of


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return runs.write_saving_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "run"
    done = run_ranks("testing.interrupting", "never", *flags, "--output_dir", str(output), ranks=2, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return output


def names(output):
    return sorted(path.name for path in output.glob("checkpoint-*"))


def assert_whole(folder):
    assert manifest.flaw(folder) is None and manifest.damage(folder) is None
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there - {manifest.RECORD} == set(manifest.recorded(folder)["files"])


def test_a_checkpoint_says_what_it_holds_and_older_ones_go(undisturbed):
    assert names(undisturbed) == ["checkpoint-4", "checkpoint-6"] and not (undisturbed / ".saving").exists()
    for name in names(undisturbed):
        assert_whole(undisturbed / name)
    record = manifest.recorded(undisturbed / "checkpoint-6")
    assert (record["step"], record["samples"]) == (6, 6 * runs.GLOBAL_BATCH) and record["world"]["ranks"] == 2
    assert record["position"]["sample"] == record["samples"] and record["run"]["run"]["versions"]["torch"]
    before = manifest.recorded(undisturbed / "checkpoint-4")
    assert 0 < before["tokens"] < record["tokens"] and record["run"]["run"]["data"] == before["run"]["run"]["data"]
    saved = [entry for entry in events.read(undisturbed) if entry["event"] == "checkpoint"]
    assert [entry["step"] for entry in saved] == [2, 4, 6]
    assert [entry["through"] for entry in saved] == ["memory", "memory", "memory"]
    assert saved[-1]["bytes"] == sum(manifest.sizes(record).values())


def test_the_umask_says_who_may_read_models_and_checkpoints(undisturbed, tmp_path):
    """Who serves a model is another account than who trained it."""
    (tmp_path / "new").touch()
    saved = [*undisturbed.glob("*.safetensors"), *undisturbed.rglob("checkpoint-*/*")]
    assert {path.stat().st_mode for path in saved if path.is_file()} == {(tmp_path / "new").stat().st_mode}


@pytest.mark.parametrize("strategy, when", marks.cases(
    ("ddp", "disk full"),
    slow=[("zero2", "elsewhere"), ("zero3", "copying, loading"), ("fsdp2", "closing, copying")],
    matrix=[("ddp", "copying, loading"), ("zero2", "closing"), ("zero3", "disk full")],
))  # fmt: skip
def test_an_interrupted_save_leaves_the_checkpoint_before_it(strategy, when, flags, undisturbed, tmp_path):
    flags = [*flags, *STRATEGIES[strategy], "--output_dir", str(tmp_path)]
    for interruption in when.split(", "):
        broken = run_ranks("testing.interrupting", interruption, *flags, ranks=2, timeout=300)
        assert broken.returncode != 0
        assert names(tmp_path) == ["checkpoint-2"] and not (tmp_path / "success.json").exists()
        assert_whole(tmp_path / "checkpoint-2")
    if when == "disk full":
        assert "checkpoint-4 could not be written by rank 1" in broken.stderr and "No space left" in broken.stderr
        assert "Traceback" not in broken.stderr
    if when == "elsewhere":
        assert "rank 1 of 2" in broken.stderr and "checkpoint-4 is not whole and got no name" in broken.stderr
    again = run_ranks("testing.interrupting", "never", *flags, ranks=2, timeout=300)
    assert again.returncode == 0, again.stderr[-3000:]
    assert losses_of(tmp_path) == pytest.approx(losses_of(undisturbed), rel=1e-5)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6"] and not (tmp_path / ".saving").exists()
    for name in names(tmp_path):
        assert_whole(tmp_path / name)
    before = [manifest.recorded(output / "checkpoint-6")["tokens"] for output in (tmp_path, undisturbed)]
    assert before[0] == before[1], "tokens before the interruption count"


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    there = bytearray(path.read_bytes())
    there[len(there) // 2] ^= 1
    path.write_bytes(there)


@pytest.mark.parametrize("strategy, damage, said", marks.cases(
    ("ddp", flip, "is not what was written"),
    slow=[("fsdp2", cut, "has "), ("zero3", Path.unlink, "is missing")],
    matrix=[("zero2", flip, "is not what was written")],
))  # fmt: skip
def test_a_damaged_part_is_named_and_the_checkpoint_before_it_taken(
    strategy, damage, said, flags, undisturbed, tmp_path
):
    """Also where another rank than the first reads the part."""
    run = tmp_path / "run"
    flags = [*flags, *STRATEGIES[strategy], "--output_dir", str(run)]
    if strategy == "ddp":
        shutil.copytree(undisturbed, run)
    else:
        assert run_ranks("testing.interrupting", "never", *flags, ranks=2, timeout=300).returncode == 0
    for name in ("success.json", "trainer_state.json", "model.safetensors"):
        (run / name).unlink()
    files = manifest.sizes(manifest.recorded(run / "checkpoint-6"))
    largest = max(manifest.shares(files, 2)[1], key=files.__getitem__)
    damage(run / "checkpoint-6" / largest)
    again = run_ranks("testing.interrupting", "never", *flags, ranks=2, timeout=300)
    assert again.returncode == 0, again.stderr[-3000:]
    told = " ".join(again.stdout.split())  # the table folds its cells
    assert f"checkpoint-6: {largest} {said}" in told and f"from {run / 'checkpoint-4'}" in told
    assert losses_of(run) == pytest.approx(losses_of(undisturbed), rel=1e-5)
    assert_whole(run / "checkpoint-6")
    if strategy == "ddp":
        for path in run.glob("checkpoint-*/optimizer.pt"):
            damage(path)
        (run / "success.json").unlink()
        refused = run_ranks("testing.interrupting", "never", *flags, ranks=2, timeout=300)
        assert refused.returncode == 2 and "there is none to continue from" in refused.stderr
        assert "--fresh moves this run aside" in refused.stderr and "Traceback" not in refused.stderr
