"""A checkpoint's step is its manifest's, and a run is finished where its marker and its model are what was written."""

import json
import shutil
from types import SimpleNamespace

import pytest

from brigade.errors import UserError
from brigade.hosts import host_facts
from brigade.train.checkpoint import manifest, resume, saved_weights
from brigade.train.host import checksums
from brigade.train.run import directory as runs
from brigade.train.run import on_disk, same_run, starts
from brigade.train.run.success import SUCCESS, of_model, unfinished


def checkpoint(output, step):
    folder = output / f"checkpoint-{step}"
    folder.mkdir()
    (folder / on_disk.STATE).write_text(json.dumps({"global_step": step}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for name in ("optimizer.pt", "scheduler.pt"):
        (folder / name).write_bytes(b"1")
    files = {
        path.name: {"bytes": path.stat().st_size, "checksum": checksums.of_file(path)} for path in folder.iterdir()
    }
    manifest.write(folder, {"step": step}, files)


@pytest.fixture
def output(tmp_path, monkeypatch):
    """A run with checkpoints of steps 4, 8 and 12."""
    for name in ("_check", "_check_run"):
        monkeypatch.setattr(resume, name, lambda *_: None)
    output = tmp_path / "run"
    output.mkdir()
    (output / runs.RECORD).write_text("training: {max_steps: 12}")
    for step in (4, 8, 12):
        checkpoint(output, step)
    return output


def chosen(output, named=None):
    return resume.choose(run_of(output, named), "", {})


def run_of(output, named):
    settings = SimpleNamespace(resume_from_checkpoint=named, fresh=False)
    here = SimpleNamespace(replica=0, size=1, rank=0, local_size=1, local_rank=0)
    strategy = SimpleNamespace(writes_in_parts="")
    return SimpleNamespace(settings=settings, directory=output, own_directory=output, replica=here, strategy=strategy)


def rename(old, new):
    return lambda output: (output / f"checkpoint-{old}").rename(output / f"checkpoint-{new}")


def copy(old, new):
    def change(output):
        shutil.rmtree(output / f"checkpoint-{new}", ignore_errors=True)
        shutil.copytree(output / f"checkpoint-{old}", output / f"checkpoint-{new}")

    return change


def swap(output):
    (output / "checkpoint-12").rename(output / "aside")
    (output / "checkpoint-4").rename(output / "checkpoint-12")
    (output / "aside").rename(output / "checkpoint-4")


def without_manifest(output):
    (output / "checkpoint-12" / manifest.RECORD).unlink()


def renamed_without_manifest(output):
    without_manifest(output)
    rename(12, 1012)(output)


def neither(output):
    without_manifest(output)
    (output / "checkpoint-12" / on_disk.STATE).write_text("")


@pytest.mark.parametrize("change, taken, odd, left, steps", [
    (lambda output: None, "checkpoint-12", "", [], [4, 8, 12]),
    (rename(12, 1012), "checkpoint-1012", "it holds step 12, by its manifest", [], [4, 8, 12]),
    (rename(4, 1012), "checkpoint-12", "", ["checkpoint-1012: it holds step 4"], [4, 8, 12]),
    (rename(12, 2), "checkpoint-2", "it holds step 12", [], [4, 8, 12]),
    (copy(4, 12), "checkpoint-8", "", ["checkpoint-12: it holds step 4"], [4, 8]),
    (copy(12, 1012), "checkpoint-12", "", ["checkpoint-1012: it holds step 12"], [4, 8, 12]),
    (copy(12, 2), "checkpoint-12", "", ["checkpoint-2: it holds step 12"], [4, 8, 12]),
    (swap, "checkpoint-4", "it holds step 12", ["checkpoint-12: it holds step 4"], [4, 8, 12]),
    (without_manifest, "checkpoint-12", "without its manifest, brigade.json", [], [4, 8, 12]),
    (renamed_without_manifest, "checkpoint-1012", "without its manifest", [], [4, 8, 12]),
    (neither, "checkpoint-8", "", ["checkpoint-12: it cannot be read"], [4, 8, 12]),
])  # fmt: skip
def test_a_run_goes_on_at_the_step_of_the_manifest(output, change, taken, odd, left, steps):
    change(output)
    folder, skipped = chosen(output)
    assert folder.name == taken and odd in manifest.oddity(folder) and bool(odd) == bool(manifest.oddity(folder))
    assert len(skipped) == len(left) and all(map(str.startswith, skipped, left))
    assert sorted(on_disk.whole_checkpoints(output)) == steps
    assert host_facts.progress(output)["checkpoint"] == max(steps), "what launch tells of it"
    assert starts.main(output, "slurm-7") == 0, "what a job's script counts"
    assert json.loads((output / starts.FILE).read_text())["step"] == max(steps)
    assert saved_weights.find(output, on_disk.step_of(folder)) == folder


def test_a_named_directory_is_called_what_its_user_likes(output, monkeypatch):
    """A copy that was put aside, say."""
    kept = output / "best"
    rename(8, 8008)(output)
    (output / "checkpoint-8008").rename(kept)
    folder, _ = chosen(output, str(kept))
    assert folder == kept
    assert resume.problem_together(run_of(output, str(kept)), folder, [(8, "best")] * 2) is None
    assert manifest.oddity(folder) == "it holds step 8, by its manifest"
    monkeypatch.chdir(kept)
    assert chosen(output, ".")[0].name == "best", "a run whose ranks had all chosen a nameless one began anew"


def test_a_step_is_named_by_its_manifest(output):
    copy(4, 12)(output)
    with pytest.raises(UserError, match="checkpoint-12 holds step 4, by its manifest") as error:
        saved_weights.find(output, 12)
    assert error.value.cure == "checkpoints there are: 4, 8"


SETTINGS = SimpleNamespace(fresh=False, remote=None)


MODEL = b"0123456789" * 400_000  # more than is read of it


def finish(output):
    (output / "model.safetensors").write_bytes(MODEL)
    (output / SUCCESS).write_text(json.dumps({"steps": 12, **of_model(output)}))


def rewritten(name, content):
    return lambda output: (output / name).write_bytes(content)


def folder_for_model(output):
    (output / "model.safetensors").unlink()
    (output / "model.safetensors").mkdir()


DAMAGE = {
    "whole": (lambda output: None, ""),
    "of an earlier version": (rewritten(SUCCESS, b'{"steps": 12}'), ""),
    "no marker": (lambda output: (output / SUCCESS).unlink(), "there is no success.json"),
    "no bytes": (rewritten(SUCCESS, b""), "success.json is not what was written"),
    "half": (rewritten(SUCCESS, b'{"steps": 12, "mod'), "success.json is not what was written"),
    "a list": (rewritten(SUCCESS, b"[]"), "success.json is not what was written"),
    "zeros": (rewritten(SUCCESS, bytes(40)), "success.json is not what was written"),
    "another kind": (rewritten(SUCCESS, b'{"model": [1]}'), "success.json is not what was written"),
    "no model": (lambda output: (output / "model.safetensors").unlink(), "model.safetensors is missing"),
    "part of the model": (rewritten("model.safetensors", bytes(100)), "model.safetensors has 100 bytes of 4,000,000"),
    "zeros for a model": (rewritten("model.safetensors", bytes(len(MODEL))), "model.safetensors is not what was written"),
    "its last page is lost": (
        rewritten("model.safetensors", MODEL[:-4096] + bytes(4096)), "model.safetensors is not what was written"),
    "its second half is lost": (
        rewritten("model.safetensors", MODEL[: len(MODEL) // 2] + bytes(len(MODEL) // 2)),
        "model.safetensors is not what was written"),
    "its first byte": (rewritten("model.safetensors", b"1" + MODEL[1:]), "model.safetensors is not what was written"),
    "no samples, of an earlier version": (
        lambda output: (output / SUCCESS).write_text(json.dumps({"model": of_model(output)["model"]})), ""),
    "a folder": (folder_for_model, "model.safetensors is missing"),
}  # fmt: skip


@pytest.mark.parametrize("damage, problem", DAMAGE.values(), ids=DAMAGE)
def test_a_run_is_finished_where_its_marker_and_its_model_are_whole(output, prints, damage, problem, mistake):
    finish(output)
    damage(output)
    assert unfinished(output) == problem
    assert runs._is_finished(SETTINGS, output, resized=False) == (not problem), "it goes on from checkpoint 12"
    said = prints(0, "status", str(output))
    assert ("succeeded" in said) == (not problem) and (problem in said or "no success.json" in problem)
    of_model = problem.startswith("model")
    if of_model:
        assert "the run is finished, and its model is" in mistake(saved_weights.find, output, None)
    else:
        assert saved_weights.find(output, None) == (output / "checkpoint-12" if problem else output)
    remote = SimpleNamespace(fresh=False, remote="s3://bucket/run")
    assert runs._is_finished(remote, output, resized=False) == (not problem or of_model), "the storage has the model"
    for step in (4, 8, 12):
        shutil.rmtree(output / f"checkpoint-{step}")
    if of_model:  # hours of training are not begun again by themselves
        with pytest.raises(UserError, match="no checkpoint to make it anew of") as error:
            runs._is_finished(SETTINGS, output, resized=False)
        assert "bring it back from a copy" in error.value.cure
    else:
        assert runs._is_finished(SETTINGS, output, resized=False) == (not problem)
    how = "from 12 to 20 steps"
    kept = same_run.kept(how, True, output / runs.RECORD, output / SUCCESS)
    assert kept["lengthened"][0]["how"] == how
