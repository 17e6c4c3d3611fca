"""Checkpoints that somebody has changed at random: nothing runs, is written elsewhere or waits; they are told or read."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from brigade.errors import UserError
from brigade.train.checkpoint import compatibility, manifest, resume, saved_weights, states
from brigade.train.host import checksums
from brigade.train.run.directory import RECORD
from testing.patience import in_time
from testing.small_checkpoints import RUN, SAVE, Forged

SECONDS = 20  # for one checkpoint; without faults it takes a fraction of one
PLACE = st.integers(0, 2**16)  # in a file, counted round and round: its size must not decide what is drawn
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3), lambda value: st.lists(value, max_size=2)
)


def sign(folder: Path) -> None:
    """A record of the files as they are, with all checksums right: they are no secret."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != manifest.RECORD]
    entries = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "checksum": checksums.of_file(path)}
        for path in files
        if not path.is_symlink()
    }
    cluster = {"ds_config": {"zero_optimization": {"stage": 3}}, "accelerate_config": None}
    run = {"run": {"ranks": 1, "strategy": {"name": "zero3"}, "versions": {"torch": "2"}}, "cluster": cluster}
    manifest.write(folder, {"step": 2, "tokens": 9, "base": {}, "run": run}, entries)


def of_deepspeeds_classes() -> dict[str, object]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    scaler = DynamicLossScaler(2.0**16, 2.0, 1000, 1.0, 1, False, torch.float16)
    return {"zero_stage": ZeroStageEnum.weights, "loss_scaler": scaler}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small checkpoint of each engine."""
    folder = tmp_path_factory.mktemp("whole")
    for engine, save in SAVE.items():
        save(folder / engine, **(of_deepspeeds_classes() if engine == "ZeRO-3" else {}))
        (folder / engine / "trainer_state.json").write_text('{"global_step": 2}')
        torch.save({"last_epoch": 2}, folder / engine / "scheduler.pt")
        sign(folder / engine)
    return folder


# ---- what is done to a file: each is given its path, what lies outside, and random numbers ----------------------------
def flip(path, outside, data):
    content = bytearray(path.read_bytes() or b"\0")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(PLACE) % len(content)] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)


def cut(path, outside, data):
    path.write_bytes(path.read_bytes()[: data.draw(PLACE) % (path.stat().st_size + 1)])


def forge(path, outside, data):
    forged = {data.draw(st.sampled_from(["optimizer_state_dict", "module", "state"])): Forged(outside / "marker")}
    if data.draw(st.booleans()):
        path.write_bytes(pickle.dumps(forged))
    else:
        with path.open("wb") as file:
            torch.save(forged, file, _use_new_zipfile_serialization=data.draw(st.booleans()))


def link(path, outside, data):
    path.unlink()
    path.symlink_to(data.draw(st.sampled_from([outside / "secret", "/dev/zero", path.name, "nowhere"])))


def directory(path, outside, data):
    path.unlink()
    path.mkdir()


def pipe(path, outside, data):
    path.unlink()
    os.mkfifo(path)


def remove(path, outside, data):
    path.unlink()


def mangle(path, outside, data):
    """Another value of a key in JSON, or another document; in `latest` another name."""
    try:
        document = json.loads(path.read_bytes())
    except ValueError:
        path.write_text(data.draw(st.sampled_from(["..", "/", str(outside), "global_step9", "a\nb", "\0"])))
        return
    table = document
    while isinstance(table, dict) and table:
        key = data.draw(st.sampled_from(sorted(table)))
        if not isinstance(table[key], dict) or data.draw(st.booleans()):
            table[key] = data.draw(JSON)
            break
        table = table[key]
    path.write_text(json.dumps(document if data.draw(st.booleans()) else data.draw(JSON)))


def states_where_others_lie(path, outside, data):
    """A good file in another one's place."""
    others = [other for other in sorted(path.parent.iterdir()) if other.is_file()]
    content = data.draw(st.sampled_from(others)).read_bytes() if others else b""
    path.write_bytes(content)


CHANGES = [flip, flip, cut, forge, forge, link, directory, pipe, remove, mangle, mangle, states_where_others_lie]


def use(folder: Path) -> None:
    """All that `export` and a resume read of a checkpoint by themselves."""
    if problem := manifest.flaw(folder) or manifest.damage(folder):
        raise UserError(str(folder), problem, "")
    resume.check_pickles(RUN, folder)  # type: ignore[arg-type]
    assert compatibility.written_by(folder)
    manifest.other_versions(folder)
    source = states.of_checkpoint(folder, ["weight"], {})
    with states.telling(folder):
        for key in (states.WEIGHT, *source.moments_of("weight")):
            source.read("weight", key, 0, 4)


@pytest.mark.slow
@settings(max_examples=100, phases=[Phase.generate])  # to shrink a failure takes minutes
@given(data=st.data())
def test_a_changed_checkpoint_is_told_or_read(data, whole, tmp_path_factory):
    outside = tmp_path_factory.getbasetemp() / "outside"  # the same for all: paths lie in files
    shutil.rmtree(outside, ignore_errors=True)
    outside.mkdir()
    for name in ("secret", RECORD):
        (outside / name).write_text(name)
    shutil.copytree(whole / data.draw(st.sampled_from([*SAVE])), folder := outside / "checkpoint-2")
    for _ in range(data.draw(st.integers(1, 3))):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        if files:
            data.draw(st.sampled_from(CHANGES))(data.draw(st.sampled_from(files)), outside, data)
    if data.draw(st.booleans()) and not (folder / manifest.RECORD).is_dir():
        sign(folder)
    before = sorted(outside.rglob("*"))
    for read in (use, lambda folder: saved_weights.load(saved_weights.find(outside, 2))):
        try:
            with in_time(SECONDS):
                read(folder)
        except UserError as error:
            assert len(str(error).splitlines()) <= 4
    assert sorted(outside.rglob("*")) == before, "something is written, or a stranger's code has run"
    assert (outside / "secret").read_text() == "secret"
