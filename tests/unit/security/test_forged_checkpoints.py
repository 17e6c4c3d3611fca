"""Checkpoints, models and runs of strangers: what they have pickled runs no code, what they name lies in their own directory, and
only fields of the right type are read."""

import json
import math
import os
import pickle
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from brigade.__main__ import main
from brigade.errors import UserError
from brigade.hosts import usage
from brigade.top import table
from brigade.top.watching import HostSeen, Watching
from brigade.train.checkpoint import manifest, resume, saved_weights, states
from brigade.train.host.cluster import World
from brigade.train.model import base_weights
from brigade.train.run import events, status
from brigade.train.run.typed import ANSWER, DEEPEST, EVENT, HEARTBEAT, kept, loaded
from brigade.train.run.typed import RUN as OF_RUN
from brigade.train.upstream import deepspeed_optimizers, unpickling
from testing.small_checkpoints import MODEL, MOMENTS, OPTIM, RUN, SAVE, WEIGHTS, Forged, save_fsdp2

ENGINE = SimpleNamespace(optimizer=None, _get_zero_ckpt_name=lambda folder, tag: f"{folder}/{tag}/{OPTIM}")


@pytest.fixture
def marker(tmp_path):
    marker = tmp_path / "marker"
    yield marker
    assert not marker.exists(), "a stranger's code has run"


HOLDERS = {
    "ZeRO-3": (f"global_step2/{OPTIM}", f"global_step2/{MODEL}"),
    "FSDP2": (f"{WEIGHTS}/.metadata", f"{MOMENTS}/.metadata"),
    "one process": ("optimizer.pt",),
}
EACH = [(engine, name) for engine, names in HOLDERS.items() for name in names]


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint("ZeRO-3"): a small one of that engine."""

    def save(engine: str) -> Path:
        SAVE[engine](tmp_path / "checkpoint-2")
        return tmp_path / "checkpoint-2"

    return save


def states_of(folder: Path) -> states.States:
    return states.of_checkpoint(folder, ["weight"], {})


def forge(path: Path, marker: Path, form: str) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    forged = {"optimizer_state_dict": Forged(marker)}
    if path.name == ".metadata" or form == "a bare pickle":
        path.write_bytes(pickle.dumps(forged))
    elif form == "before torch 1.6":
        torch.save(forged, path, _use_new_zipfile_serialization=False)
    else:
        torch.save(forged, path, pickle_protocol=4 if form == "protocol 4" else 2)


@pytest.mark.parametrize("form", ["torch.save", "protocol 4", "before torch 1.6", "a bare pickle"])
@pytest.mark.parametrize(("engine", "name"), EACH)
def test_what_strangers_have_pickled_runs_nothing(engine, name, form, checkpoint, marker, user_error):
    """It is refused with the file's name, and in the form that torch writes today with that of the class."""
    folder = checkpoint(engine)
    forge(folder / name, marker, form)
    readers = [lambda folder: resume.check_pickles(RUN, folder), states_of]
    readers += [saved_weights.load] if engine != "one process" and not name.startswith(MOMENTS) else []
    readers += [lambda folder: deepspeed_optimizers.restore(ENGINE, str(folder))] if name.endswith(OPTIM) else []
    for read in readers:
        error = user_error(read, folder)
        assert (error.place, "safetensors" in error.cure) == (str(folder / name), True)
        if form == "torch.save" or name.endswith(".metadata"):
            assert "it holds posix.mkdir, which no checkpoint needs" in error.problem


@pytest.mark.parametrize(
    "name", ["scheduler.pt", "scaler.pt", "rng_state_0.pth", "local_steps_0.pt", "power_sgd_0_of_1.pt"]
)
def test_what_every_engine_keeps_is_looked_at_before_it_is_loaded(name, checkpoint, marker):
    folder = checkpoint("one process")
    forge(folder / name, marker, "torch.save")
    for read in (lambda: resume.check_pickles(RUN, folder), lambda: unpickling.load(folder / name)):
        with pytest.raises(UserError, match=f"(?s){name}.*posix.mkdir"):
            read()


def test_what_changes_between_the_look_and_the_load_runs_nothing_either(checkpoint, marker, monkeypatch, mistake):
    """DeepSpeed and torch ask for weights_only=False, and torch for pickle."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    unpickling.data_only()
    folder = checkpoint("ZeRO-3")
    forge(folder / OPTIM, marker, "torch.save")
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir"):
        torch.load(folder / OPTIM, weights_only=False)
    forge(folder / ".metadata", marker, "torch.save")
    assert "posix.mkdir" in mistake(lambda: dcp.FileSystemReader(folder).read_metadata())


def test_objects_among_the_shards_of_fsdp2_are_not_built(tmp_path, marker, mistake):
    save_fsdp2(tmp_path / "checkpoint-2", object=Forged(marker))
    assert "cannot be read" in mistake(saved_weights.load, tmp_path / "checkpoint-2")


@pytest.mark.parametrize("engine", SAVE)
def test_what_engines_write_is_read(engine, checkpoint):
    folder = checkpoint(engine)
    resume.check_pickles(RUN, folder)
    source = states_of(folder)
    assert source.read("weight", states.WEIGHT, 1, 4).tolist() == [1, 1, 1]
    assert source.read("weight", "exp_avg", 0, 4).tolist() == [0] * 4
    assert "training_args.bin" not in {path.name for path in unpickling.pickled(folder)}, "nobody loads it"


def test_the_classes_that_deepspeed_writes_are_there():
    """Those of the pinned version, by their text: to import it takes seconds."""
    import importlib.util

    (folder,) = importlib.util.find_spec("deepspeed").submodule_search_locations
    for module, _, name in (full.rpartition(".") for full in unpickling.DEEPSPEED):
        file = Path(folder, *module.split(".")[1:]).with_suffix(".py")
        assert f"class {name}" in file.read_text()


@pytest.mark.parametrize("outside", ["../secret.distcp", "/etc/hostname"])
def test_shards_of_fsdp2_lie_in_their_own_directory(outside, checkpoint):
    file = checkpoint("FSDP2") / WEIGHTS / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for shard in metadata.storage_data.values():
        shard.relative_path = outside
    file.write_bytes(pickle.dumps(metadata))
    for read in (states_of, saved_weights.load):
        with pytest.raises(UserError, match=f"file of another directory: '{outside}'"):
            read(file.parents[1])


@pytest.mark.parametrize("outside", ["..", "../checkpoint-1/global_step1", "/tmp", "global_step9", ""])
def test_latest_names_a_directory_of_the_checkpoint(outside, checkpoint, mistake):
    folder = checkpoint("ZeRO-3")
    (folder / "latest").write_text(outside)
    for name in ("trainer_state.json", "scheduler.pt"):
        (folder / name).write_text("{}")
    assert "latest names" in manifest.flaw(folder)
    for read in (states_of, saved_weights.load):
        assert "latest names" in mistake(read, folder)


@pytest.mark.parametrize("outside", ["../model.safetensors", "/etc/hostname", "a/../../b", "", 7])
@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_names_files_of_its_own_directory(outside, kind, tmp_path, mistake):
    (folder := tmp_path / "model").mkdir()
    save_file({"weight": torch.ones(4)}, tmp_path / "model.safetensors")
    (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": {"weight": outside}}))
    assert "names files that are not in its directory" in mistake(base_weights.check, str(folder), False)


@pytest.mark.parametrize("form", ["torch.save", "before torch 1.6", "a bare pickle"])
def test_weights_in_pytorch_model_bin_run_nothing(form, tmp_path, marker, mistake):
    from brigade.train.recipe.files import REPOSITORY

    shutil.copy(REPOSITORY / "recipes/tiny/config.json", tmp_path)
    forge(tmp_path / "pytorch_model.bin", marker, form)
    assert "safetensors" in mistake(base_weights.check, str(tmp_path), False)


@pytest.mark.slow  # to import PEFT takes seconds
@pytest.mark.parametrize("form", ["torch.save", "before torch 1.6"])
def test_adapters_in_adapter_model_bin_run_nothing(form, tmp_path, marker):
    from peft.utils import load_peft_weights

    forge(tmp_path / "adapter_model.bin", marker, form)
    with pytest.raises(pickle.UnpicklingError, match="eights only load failed"):
        load_peft_weights(str(tmp_path), device="cpu")


# ---- what a manifest says --------------------------------------------------------------------------------------------
def recorded(folder: Path, **files: int) -> Path:
    """A checkpoint with a record whose checksums are right, as a forger writes it."""
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    manifest.write(folder, {"step": 2}, {name: {"bytes": size, "checksum": "0" * 32} for name, size in files.items()})
    return folder


@pytest.mark.parametrize("name", ["../secret", "/dev/zero", "/etc/hostname"])
def test_a_manifest_names_files_of_its_own_checkpoint(name, tmp_path):
    folder = recorded(tmp_path / "checkpoint-2", **{name: 0})
    assert manifest.flaw(folder) == f"{name!r} is no file's name within a checkpoint"


@pytest.mark.parametrize("place", ["pipe", "global_step2/pipe", "optimizer_0/pipe", "a link to a device"])
def test_nobody_waits_for_a_pipe_or_reads_a_device_to_its_end(place, tmp_path, mistake):
    folder = recorded(tmp_path / "checkpoint-2", **{place: 0})
    (folder / place).parent.mkdir(exist_ok=True)
    if place.endswith("pipe"):
        os.mkfifo(folder / place)
    else:
        (folder / place).symlink_to("/dev/zero")
    assert "is a pipe, a socket or a device, and no file" in manifest.flaw(folder)
    (tmp_path / "run.yaml").write_text("{}")
    assert "is a pipe, a socket or a device" in mistake(saved_weights.find, tmp_path, 2)


OF_A_RUN = ({"run": 7}, {"run": {"run": []}}, {"run": {"cluster": "no"}})
FORGED = (*OF_A_RUN, {"tokens": "many"}, {"files": []}, {"files": {"a": {}}})


@pytest.mark.parametrize("text, said", [
    *((json.dumps({"format": 1, "files": {}} | change), "brigade.json is not what was written") for change in FORGED),
    *((text, "it cannot be read") for text in ("[]", "7", "[" * 100_000)),
], ids=lambda text: text[:40])  # fmt: skip
def test_a_forged_manifest_is_none(text, said, tmp_path):
    (tmp_path / manifest.RECORD).write_text(text)
    assert said in manifest.flaw(tmp_path)


def test_a_record_of_two_terabytes_is_a_flaw(tmp_path):
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / manifest.RECORD).touch()
    os.truncate(tmp_path / manifest.RECORD, 2**41)
    assert "is larger than" in manifest.flaw(tmp_path)


@pytest.mark.parametrize(
    "damaged", [("optimizer.pt", b"no file of torch's"), ("optimizer.pt", b""), ("scheduler.pt", b"PK\3\4")]
)
def test_a_damaged_file_without_a_checksum_costs_this_checkpoint_and_not_the_run(checkpoint, monkeypatch, damaged):
    """It was refused, though an older whole one was there. What could run code stays refused."""
    older = checkpoint("one process")
    newest = older.with_name("checkpoint-4")
    shutil.copytree(older, newest)
    (newest / damaged[0]).write_bytes(damaged[1])

    def choose(run, fingerprint, base, found):
        left = [folder for folder in (newest, older) if folder.name not in found]
        return left[0], tuple(f"{name}: {problem}" for name, problem in found.items())

    monkeypatch.setattr(resume, "choose", choose)
    world = World(0, 0, 1, 1, "here", "python")
    run = SimpleNamespace(**vars(RUN) | {"world": world})
    folder, skipped = resume.agree(run, "", {})
    assert folder == older and skipped[0].startswith(f"checkpoint-4: {damaged[0]}: it is damaged, or torch has not")
    forge(newest / damaged[0], newest / "marker", "torch.save")
    with pytest.raises(SystemExit):
        resume.agree(run, "", {})


# ---- forged runs -----------------------------------------------------------------------------------------------------
HOST = socket.gethostname()
BEAT = {"rank": 0, "host": "elsewhere", "pid": 1, "step": 2, "phase": "forward", "seconds": 1.0}
EVIL = ["x", [], {}, None, True, -1, 10**400, math.nan, math.inf, [[1]], {"a": {}}]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "heartbeats").mkdir(parents=True)
    (folder / "run.yaml").write_text("{}")
    return folder


def nested(depth):
    return "[" * depth + "]" * depth


def test_only_fields_of_their_type_are_kept():
    event = {"step": 3, "loss": math.nan, "text": "x", "more": [1]}
    assert kept(event, EVENT).keys() == event.keys()
    for value in ("3", -1, True, 10**400, [3], None):
        assert kept({"step": value}, EVENT) == {}
    assert kept({"hosts": ["a", 1]}, EVENT) == {} and kept({"hosts": "ab"}, OF_RUN) == {} and kept([1], OF_RUN) == {}
    alias = []
    alias.append(alias)
    assert kept({"more": alias, "deep": loaded(nested(DEEPEST + 1)), 7: "x"}, EVENT) == {}


def test_a_document_without_end_is_no_document():
    with pytest.raises(ValueError, match="nested without end"):
        loaded(nested(100_000))


@pytest.mark.parametrize("key", [*BEAT, "waits", "tokens", "at"])
def test_top_shows_forged_heartbeats(key, run, prints, monkeypatch):
    from brigade.hosts import launches

    monkeypatch.setattr(launches, "hosts", set)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for number, value in enumerate(EVIL):
        (run / "heartbeats" / f"rank-{number}.json").write_text(json.dumps(BEAT | {"rank": number, key: value}))
    (run / "heartbeats" / "rank-99.json").write_text(json.dumps(BEAT | {"rank": 99}))
    (run / "heartbeats" / "rank-98.json").write_text(nested(100_000))
    (run / "events.jsonl").write_text("\n".join(json.dumps({"event": "slow", "rank": value}) for value in EVIL))
    assert "elsewhere" in prints(0, "top", str(run), "--once")
    assert all(type(says["rank"]) is int for says in usage.heartbeats(run).values())


def test_status_of_forged_events(run, capsys):
    lines = [{"event": "step", "time": value, "step": value, "steps": value, "loss": value} for value in EVIL]
    lines += [{"event": "grace", "seconds": value} for value in EVIL]
    (run / "events.jsonl").write_text("\n".join([*map(json.dumps, [*lines, *EVIL]), nested(100_000), "{"]))
    forged = {"strategy": "x", "hosts": {"a": 1}, "ranks": "9; id", "replicas": []}
    (run / "run.yaml").write_text(json.dumps({"run": forged}))
    (run / "success.json").write_text("[]")
    assert main(["status", str(run)]) == 0 and main(["status", "--json", str(run)]) == 0
    known = status.of(run)
    assert (known["state"], known["problem"]) == ("ended", "success.json is not what was written")
    assert all(isinstance(line, dict) for line in events.read(run))
    assert status.ranks_of({"ranks": "9; id"}) == 0


@pytest.mark.parametrize("facts", [
    {}, {"at": "x", "host": {}}, {"at": 1.0, "host": []}, {"at": 1.0, "host": {"busy": []}},
    {"at": 1.0, "host": {"busy": 1.0, "joules": "x"}, "gpus": 7, "ranks": [1]}, {"at": 1.0, "host": {}, "gpus": [1, {"pids": 1}]},
    {"at": 1.0, "host": dict.fromkeys(("busy", "total", "received", "sent", "joules"), "x")},
    {"at": 1.0, "host": {}, "ranks": {"x": {}, "1": [], "2": {"step": "x", "waits": 3}, "3": BEAT | {"phase": 1}}},
], ids=str)  # fmt: skip
def test_a_host_that_says_nonsense_does_not_end_top(facts):
    from brigade.errors.console import console

    watching = Watching(["node1"], Path("run"), 1.0)
    for seconds in (0, 1):
        at = {"at": facts["at"] + seconds} if isinstance(facts.get("at"), float) else {}
        watching.hosts["node1"].add(facts | at)
    with Path(os.devnull).open("w") as nothing:
        console(file=nothing).print(table.render(watching))
    assert isinstance(watching.hosts["node1"], HostSeen)


def test_what_runs_write_is_kept_whole():
    assert kept(BEAT, HEARTBEAT) == BEAT
    waits = {"collective": "all_reduce", "number": 7, "group": "0", "more": [1]}
    assert kept(BEAT | {"waits": waits}, HEARTBEAT)["waits"] == waits
    answer = {"step": 3, "source": "", "question": "a book " * 50_000, "reference": "its end", "answer": "x" * 200_000}
    assert kept(answer, ANSWER) == answer
