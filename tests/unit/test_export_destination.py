"""Where `python -m brigade export` writes: a new or an empty directory, and nothing that is left elsewhere."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from brigade.errors import UserError
from brigade.export import hugging_face
from brigade.train.data import builtin
from brigade.train.recipe import flags
from brigade.train.recipe.files import REPOSITORY
from brigade.train.run.directory import RECORD
from brigade.train.run.success import SUCCESS


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A finished run of a tiny model that was trained whole."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("run")
    config = json.loads((REPOSITORY / "recipes/tiny/config.json").read_text())
    config |= {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(builtin.TOKENIZER).save_pretrained(folder)
    for name in (RECORD, SUCCESS):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def export(output):
    settings = flags.load(["--model_name_or_path", str(output), "--from_scratch", "false"])
    return lambda destination: hugging_face.export(settings, output, destination)


def whole(folder):
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names
    assert not [name for name in names if name.startswith(".")]
    (folder / "new").touch()
    modes = {path.stat().st_mode for path in folder.iterdir() if path.is_file()}
    assert modes == {(folder / "new").stat().st_mode}, "who serves a model is another account"


@pytest.mark.parametrize("given", [".", "../here", "empty", "new", "deep/new", "../beside"])
def test_any_name_of_a_new_or_empty_directory(export, tmp_path, monkeypatch, given):
    here = tmp_path / "home" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    destination = Path(given)
    if given == "empty":
        destination.mkdir()
    number = destination.stat().st_ino if destination.exists() else None
    assert export(destination).directory == destination
    whole(destination)
    assert number in (None, destination.stat().st_ino), (
        "a shell stands in it, or it is a mount's: it stays the same one"
    )
    assert {path.name for path in here.parent.iterdir()} <= {"here", "beside"}
    assert given in (".", "../here") or {path.name for path in here.iterdir()} <= {"empty", "new", "deep"}


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("step", ["saved_tokenizer", "_whole"])
def test_a_failed_export_leaves_nothing(export, tmp_path, monkeypatch, there, step):
    def fails(*_):
        with Path("/dev/full").open("w") as full:
            full.write("x")

    destination = tmp_path / "home" / "out"
    (destination if there else destination.parent).mkdir(parents=True)
    with monkeypatch.context() as patched, pytest.raises((OSError, UserError), match="No space left"):
        patched.setattr(f"{hugging_face.__name__}.{step}", fails)
        export(destination)
    assert [path.name for path in destination.parent.iterdir()] == ["out"] * there
    assert not there or not list(destination.iterdir())
    export(destination)
    whole(destination)


@pytest.fixture
def run(output, tmp_path):
    """A copy of that run, with a recipe of its own."""
    run = shutil.copytree(output, tmp_path / "run")
    recipe = {"model": {"model_name_or_path": str(output)}, "data": {"dataset_name": "python-docs", "max_length": 64}}
    (run / RECORD).write_text(json.dumps(recipe | {"training": {"global_batch_size": 4}}))
    (run / SUCCESS).write_text(json.dumps({"held_out_loss": 1.0, "held_out_loss_before": 2.0}))
    return run


def test_a_destination_that_cannot_be_written_is_told_before_anything_is_read(run, tmp_path, monkeypatch, prints):
    monkeypatch.setattr(hugging_face, "_whole", None)
    (tmp_path / "file").touch()
    for destination, reason in ((tmp_path / "file" / "out", "Not a directory"), (Path("/proc/out"), "No such file")):
        told = prints(2, "export", str(run), str(destination))
        assert reason in told and told.startswith(f"error: {destination}\n") and "cure: name another" in told


def test_a_destination_that_fills_is_named(run, tmp_path, monkeypatch, prints):
    from transformers import PreTrainedModel

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda *_: Path("/dev/full").write_text("x"))
    told = prints(2, "export", str(run), str(tmp_path / "out"))
    assert str(tmp_path / "out") in told and "No space left" in told and "bytes are free there" in told, told


def empty(file):
    file.write_bytes(b"")


def gone(file):
    """Though there is a checkpoint: it may be of another step."""
    shutil.copytree(file.parent, file.parent / "checkpoint-1")
    (file.parent / "checkpoint-1" / "trainer_state.json").write_text("{}")
    file.unlink()


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def renamed(file):
    save_file({f"module.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


@pytest.mark.parametrize("verb", ["export", "eval", "chat"])
@pytest.mark.parametrize("name, damage, said", [
    ("model.safetensors", empty, "damaged"), ("model.safetensors", cut, "damaged"), ("model.safetensors", gone, "is gone"),
    ("config.json", gone, "config.json"), ("run.yaml", gone, "no run.yaml"),
    ("model.safetensors", renamed, "module."), ("config.json", empty, "JSON"), ("tokenizer.json", cut, "cannot be loaded"),
])  # fmt: skip
def test_a_damaged_output_is_told(run, tmp_path, prints, verb, name, damage, said):
    damage(run / name)
    words = {"export": [str(tmp_path / "out")], "chat": ["--question", "What follows?"]}
    told = prints(2, verb, str(run), *words.get(verb, []))
    assert told.startswith(f"error: {run}") and said in told and "cure: " in told and len(told.splitlines()) <= 4, told
    assert not (tmp_path / "out").exists()


def test_a_directory_that_holds_something_is_refused(export, tmp_path, mistake):
    (tmp_path / "file").touch()
    assert "not empty" in mistake(export, tmp_path) and "not empty" in mistake(export, tmp_path / "file")
