"""A checkpoint's manifest: no byte of a checkpoint changes or goes missing without being seen."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brigade.train.checkpoint import manifest, memory_stage
from brigade.train.host import checksums
from brigade.train.recipe.files import read_yaml

CONTENT = {
    "trainer_state.json": b'{"global_step": 2}\n',
    "scheduler.pt": bytes(range(40)),
    "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt": bytes(range(255, 200, -1)),
}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint-2"
    for name, content in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    files = {
        name: {"bytes": len(content), "checksum": checksums.of_file(folder / name)} for name, content in CONTENT.items()
    }
    manifest.write(folder, {"step": 2, "tokens": 1234, "run": {"training": {"learning_rate": 1e-3}}}, files)
    assert manifest.flaw(folder) is manifest.damage(folder) is None
    return folder


def said(folder: Path) -> str | None:
    return manifest.flaw(folder) or manifest.damage(folder)


@pytest.mark.parametrize("name", [*CONTENT, manifest.RECORD])
def test_every_changed_byte_and_every_cut_is_found_and_names_the_file(name, checkpoint):
    path = checkpoint / name
    whole = path.read_bytes()
    for at in range(len(whole)):
        for change in (1 << at % 8, ord("\n") ^ ord("\r")):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])
            found = said(checkpoint)
            assert found and (name in found or name == manifest.RECORD), (at, change, found)
        path.write_bytes(whole[:at])
        assert said(checkpoint), f"cut to {at} bytes"
    path.write_bytes(whole)
    assert said(checkpoint) is None
    path.unlink()
    if name != manifest.RECORD:
        assert manifest.flaw(checkpoint) == f"{name} is missing"


def test_a_checkpoint_of_a_later_version_is_none_of_ours_and_one_of_an_earlier_still_is(checkpoint):
    path = checkpoint / manifest.RECORD
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"format": manifest.FORMAT + 1}))
    assert "format 3, and this version of Brigade knows 2" in manifest.flaw(checkpoint)
    sizes = {name: len(content) for name, content in CONTENT.items()}
    path.write_text(json.dumps({"run": {}, "base": {}, "files": sizes}))
    assert said(checkpoint) is None and manifest.sizes(manifest.recorded(checkpoint)) == sizes
    path.write_text(json.dumps({"run": {}, "base": {}, "files": sizes | {"scheduler.pt": 41}}))
    assert manifest.flaw(checkpoint) == "scheduler.pt has 40 bytes of 41"


def test_other_code_is_named(checkpoint, monkeypatch):
    """A run continues under other versions, but not in silence: its losses may be others."""
    versions = {"torch": "2.12.0", "transformers": "5.23.0"}
    manifest.write(checkpoint, {"run": {"run": {"versions": versions, "commit": "0123456789ab"}}}, {})
    monkeypatch.setattr(manifest.versions, "of_packages", lambda: versions | {"torch": "2.13.0"})
    monkeypatch.setattr(manifest.versions, "git_commit", lambda: "0123456789ab")
    assert manifest.other_versions(checkpoint) == "torch 2.12.0, now 2.13.0"
    monkeypatch.setattr(manifest.versions, "git_commit", lambda: None)  # a copy without git
    assert "Brigade" not in manifest.other_versions(checkpoint)


def test_ranks_share_the_reading():
    files = {f"file-{number}": 10 * number for number in range(20)} | {"large": 500}
    found = manifest.shares(files, 4)
    assert sorted(name for names in found for name in names) == sorted(files)
    loads = [sum(files[name] for name in names) for names in found]
    assert max(loads) == 690 or max(loads) - min(loads) <= 500
    assert found == manifest.shares(dict(reversed(files.items())), 4), "the same on all ranks, whatever order they list"


def test_memory_that_a_killed_process_left_is_given_back_by_the_next_one(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_stage, "MEMORY", tmp_path)
    leave = f"""import os, pathlib
from brigade.train.checkpoint import memory_stage
memory_stage.MEMORY = pathlib.Path({str(tmp_path)!r})
lock = memory_stage.make("dead")
(memory_stage.path("dead") / "optimizer.pt").write_bytes(bytes(100))
os.kill(os.getpid(), 9)"""
    assert subprocess.run([sys.executable, "-c", leave], timeout=60).returncode == -9
    assert (tmp_path / "brigade.dead" / "optimizer.pt").exists()
    locks = [memory_stage.make(name) for name in ("mine", "my-second", "my-third")]
    assert len(locks) == 3 and memory_stage.path("mine").is_dir() and not (tmp_path / "brigade.dead").exists()


@pytest.mark.parametrize("content", ["", "- 1\n", "training: {"])
def test_the_cure_of_a_damaged_run_yaml_brings_back_what_a_checkpoint_holds(checkpoint, content, user_error):
    """Its cure was the tiny recipe."""
    record = checkpoint.parent / "run.yaml"
    record.write_text(content)
    (checkpoint.parent / "checkpoint-10").mkdir()
    shutil.copy(checkpoint / manifest.RECORD, checkpoint.parent / "checkpoint-10")
    caught = user_error(read_yaml, record)
    assert "checkpoint-10/brigade.json" in caught.cure
    subprocess.run(caught.cure.removeprefix("a checkpoint has a copy: "), shell=True, check=True)
    assert read_yaml(record) == {"training": {"learning_rate": 1e-3}}


def test_without_a_checkpoint_a_damaged_run_yaml_has_no_such_cure(tmp_path, user_error):
    for name, cure in (("run.yaml", "bring it back from a copy"), ("mine.yaml", "see recipes/tiny/full.yaml")):
        (tmp_path / name).touch()
        assert user_error(read_yaml, tmp_path / name).cure.startswith(cure)
