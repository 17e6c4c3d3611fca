"""Where `python -m brigade export` writes: a new or an empty directory, and nothing that is left elsewhere; and what arrives at
the Hub, and what a user reads where it takes nothing."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file, save_file

from brigade.__main__ import main
from brigade.errors import UserError
from brigade.export import card, hugging_face
from brigade.export.card import Base
from brigade.train.host import hub as reaching
from brigade.train.recipe import flags
from brigade.train.recipe.schema import Recipe
from brigade.train.run.directory import RECORD
from brigade.train.run.success import SUCCESS
from testing import gguf_models, runs
from testing.pretended_hub import READS, WRITES, pretended_hub


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A finished run of a tiny model that was trained whole."""
    folder = runs.write_model(tmp_path_factory.mktemp("run"), "llama")
    for name in (RECORD, SUCCESS):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def export(output):
    settings = flags.load(["--model_name_or_path", str(output), "--from_scratch", "false"])
    return lambda destination: hugging_face.export(settings, output, destination)


def test_a_weight_that_fp16_does_not_hold_is_named_and_leaves_nothing(output, tmp_path, mistake):
    large = shutil.copytree(output, tmp_path / "run")
    weights = load_file(large / "model.safetensors")
    weights["model.norm.weight"][0] = 1e5
    save_file(weights, large / "model.safetensors", {"format": "pt"})
    settings = flags.load(["--model_name_or_path", str(large), "--from_scratch", "false"])
    for dtype, said in ((torch.float16, "model.norm.weight has a weight beyond fp16's range"), (torch.bfloat16, "")):
        write = lambda dtype=dtype: hugging_face.export(settings, large, tmp_path / "out", dtype=dtype)  # noqa: E731
        assert said in mistake(write) if said else write()
        assert (tmp_path / "out").exists() != bool(said)


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


# ---- to the Hub ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished trained of a tiny model that was trained whole, from a published base."""
    folder = gguf_models.save(tmp_path_factory.mktemp("run"), **gguf_models.PLAIN["llama-tied"])
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# The base\n")
    recipe = {
        "model": {"model_name_or_path": str(folder), "from_scratch": False},
        "data": {"dataset_name": "someone/sentences", "max_length": 64, "chat_template": "chatml"},
        "training": {"global_batch_size": 4, "learning_rate": 0.5},
        "run": {"versions": {"torch": "2.13.0"}, "batch": "4 sequences"},
    }
    (folder / RECORD).write_text(yaml.safe_dump(recipe))
    (folder / SUCCESS).write_text(json.dumps({"held_out_loss": 1.25, "held_out_loss_before": 2.5, "steps": 7}))
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with pretended_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", WRITES)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        reaching.hub_is_away.cache_clear()
        yield server
    reaching.hub_is_away.cache_clear()


def files_of(folder: Path):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_exported_files_arrive_with_a_card_of_the_run(trained, hub, tmp_path, capsys, prints):
    out = tmp_path / "mine"
    said = prints(0, "export", str(trained), str(out), "--gguf", "--push", "mine", "--private")
    assert f"{hub.address}/me/mine" in said
    assert hub.repositories == {"me/mine": files_of(out)} and hub.private == {"me/mine"}
    assert {"model.safetensors", "mine-F16.gguf", "tokenizer.json", "README.md"} <= files_of(out).keys()
    text = (out / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.library_name == "transformers" and card.data.license == "mit"
    assert card.data.datasets == ["someone/sentences"] and "gguf" in card.data.tags
    for word in ("1.2500", "2.5000", "7 steps", "learning_rate | 0.5", "torch 2.13.0", "me/mine", "full fine-tuning"):
        assert word in text, word
    assert str(trained) not in text, "a path of this machine is nobody's business"

    # An earlier model's adapters, shards and GGUF file go in the same commit; what is not loaded by itself stays.
    earlier = ("adapter_config.json", "adapter_model.safetensors", "model-00001-of-00002.safetensors", "old-F16.gguf")
    kept = ("notes.md", ".gitattributes", "figures/model.safetensors")
    hub.repositories["me/mine"] |= dict.fromkeys((*earlier, *kept), b"old")
    again = tmp_path / "again"  # its own card is replaced, and another's is not
    assert main(["export", str(trained), str(again), "--push", "me/mine"]) == 0
    assert hub.repositories["me/mine"] == files_of(again) | dict.fromkeys(kept, b"old")
    told = capsys.readouterr().out
    assert "Removed there" in told and all(name in told for name in (*earlier, "mine-F16.gguf")) and "notes" not in told
    hub.repositories["me/mine"]["README.md"] = b"# By hand"
    said = prints(2, "export", str(trained), str(tmp_path / "third"), "--push", "me/mine")
    assert "that export did not write" in said
    assert hub.repositories["me/mine"]["README.md"] == b"# By hand" and not (tmp_path / "third").exists()


@pytest.mark.parametrize("token, name, words", [
    (None, "mine", ["no token", "hf auth login", "HF_TOKEN"]),
    ("hf_unknown", "mine", ["does not know the token", "/settings/tokens"]),
    (WRITES, "not a name", ["no name of a repository", "OWNER/NAME"]),
])  # fmt: skip
def test_what_cannot_be_pushed_is_told_before_anything_is_written(
    trained, hub, tmp_path, monkeypatch, prints, token, name, words
):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    told = prints(2, "export", str(trained), str(tmp_path / "out"), "--push", name)
    assert told.startswith("error: flag --push\n") and all(word in told for word in words), told
    assert not (tmp_path / "out").exists() and not hub.repositories


def test_a_token_that_may_only_read_leaves_the_export(trained, hub, tmp_path, monkeypatch, prints):
    monkeypatch.setenv("HF_TOKEN", READS)
    told = prints(2, "export", str(trained), str(tmp_path / "out"), "--push", "you/mine")
    assert "may not write to you/mine (403)" in told and f"`hf upload you/mine {tmp_path / 'out'}`" in told
    assert "model.safetensors" in files_of(tmp_path / "out")


def test_adapters_whose_base_nobody_else_has_are_not_pushed(trained, hub, tmp_path, capsys):
    with_adapters = tmp_path / "run"
    with_adapters.mkdir()
    recipe = yaml.safe_load((trained / RECORD).read_text())
    recipe["model"]["use_peft"] = True
    (with_adapters / RECORD).write_text(yaml.safe_dump(recipe))
    assert main(["export", str(with_adapters), str(tmp_path / "out"), "--push", "mine"]) == 2
    assert "only adapters" in (told := capsys.readouterr().err) and "cure: --merge" in told
    assert not hub.repositories


def test_what_is_public_is_not_pushed_to_as_private(trained, hub, tmp_path, prints):
    hub.repositories["me/mine"] = {"notes.md": b"read by many"}
    told = prints(2, "export", str(trained), str(tmp_path / "out"), "--push", "mine", "--private")
    assert told.startswith("error: flag --private") and "everybody can read it" in told
    assert not (tmp_path / "out").exists() and [*hub.repositories["me/mine"]] == ["notes.md"]
    hub.private.add("me/mine")
    assert main(["export", str(trained), str(tmp_path / "out"), "--push", "mine", "--private"]) == 0
    assert "model.safetensors" in hub.repositories["me/mine"]


MARK = "/home/somebody/secret"


def test_no_key_of_a_recipe_shows_a_path_in_the_card():
    """Marks in every key that takes a text, whichever its form is."""
    sections = {}
    for name in ("model", "data", "training"):
        values = {
            key: [f"{MARK}/{key}", {f"{MARK}/in": f"~/secret/{key}.py:loss"}]
            for key in Recipe.model_fields[name].annotation.model_fields
        }
        sections[name] = SimpleNamespace(model_dump=lambda values=values, **_: values)
    shown = card._keys(SimpleNamespace(recipe=SimpleNamespace(**sections)))
    assert "secret" not in shown and "model_name_or_path" in shown and "model_name_or_path.py:loss" in shown


@pytest.mark.parametrize("value, shown", [
    ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"), ("cosine", "cosine"), (0.5, 0.5), (None, None),
    (f"{MARK}/base", "base"), ("~/base", "base"), ("../base", "base"), ("secret/loss.py:mine", "loss.py:mine"),
    ("secret/data.jsonl", "data.jsonl"), (r"C:\secret\base", "base"),
    ([f"{MARK}/a", {"reference": f"{MARK}/b/"}], ["a", {"reference": "b"}]),
    (f"As {MARK}/rules.md says, and/or not.", "As rules.md says, and/or not."), ("s3://secret/runs/base", "base"),
    ("See https://example.org/a/b for all.", "See https://example.org/a/b for all."),
    ("https://secret.example/set/data.bin?token=secret", "data.bin"), (r"layers\.[0-3]\..*_proj", r"layers\.[0-3]\..*_proj"),
])  # fmt: skip
def test_of_a_path_only_the_last_part_is_shown(value, shown):
    assert card._shown(value) == shown


@pytest.mark.parametrize("key, value, shown", [
    ("image_folder", "secret/pictures", "pictures"), ("train_file", "secret/chats.bz2", "chats.bz2"),
    ("train_file", "/home/some secret/my chats.jsonl", "my chats.jsonl"), ("eval_tasks", ["secret/tasks"], ["tasks"]),
    ("validation_file", "https://secret.example/held?token=secret", "held"), ("reference", "secret models/base", "base"),
    ("dataset_name", "/secret", "secret"), ("dataset_name", "~/data", "data"), ("objective", "secret/a.py:loss", "a.py:loss"),
    ("reference", "owner/name", "owner/name"), ("dataset_name", "python-docs", "python-docs"), ("objective", "dpo", "dpo"),
    ("model_name_or_path", "file.gguf", "file.gguf"), ("model_name_or_path", "secret/file.gguf", "file.gguf"),
    ("model_name_or_path", "outputs/sft", "sft"), ("model_name_or_path", "owner/name", "owner/name"),
])  # fmt: skip
def test_what_can_be_no_name_on_the_hub_is_a_path(key, value, shown):
    assert card._shown(value, key) == shown


def test_a_path_is_no_data_set_on_the_hub():
    names = ["/gone", "~/gone", "./gone", "secret folder/gone", "owner/name", "python-docs", "a/b.jsonl"]
    sources = [SimpleNamespace(dataset_name=name, train_file=None) for name in names]
    settings = SimpleNamespace(recipe=SimpleNamespace(data=SimpleNamespace(datasets=sources, sources=sources)))
    assert card._on_hub(settings) == ["owner/name"]


@pytest.mark.parametrize("recipe, task", [
    ({}, "text-generation"), ({"training": {"objective": "reward"}}, "text-classification"),
    ({"data": {"images": True}}, "image-text-to-text"),
])  # fmt: skip
def test_the_hub_is_told_the_models_task(recipe, task, trained, tmp_path):
    settings = flags.of_run(trained, False)
    known = settings.recipe
    changed = {name: getattr(known, name).model_copy(update=values) for name, values in recipe.items()}
    settings = replace(settings, recipe=known.model_copy(update=changed))
    text = card._text(tmp_path, "me/mine", settings, Base(), trained, True, False)
    assert ModelCard(text).data.pipeline_tag == task and ("reward-model" in text) == (task == "text-classification")


def test_private_is_about_push(trained, tmp_path, prints):
    assert "error: flag --private" in prints(2, "export", str(trained), str(tmp_path / "out"), "--private")
