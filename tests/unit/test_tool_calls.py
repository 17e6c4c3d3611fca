"""The demo's data: what its generator writes anywhere, with no held-out sentence among those that are trained on."""

import importlib.util
import json

from testing.ranks import REPOSITORY

FOLDER = REPOSITORY / "recipes/smollm2-135m"


def sentences(name):
    return {json.loads(line)["messages"][1]["content"] for line in (FOLDER / f"tool_calls/{name}.jsonl").open()}


def test_the_generator_writes_the_committed_files(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("tool_calls", FOLDER / "tool_calls.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    monkeypatch.setattr(made, "FOLDER", tmp_path / "made")
    made.main()
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / "made" / name).read_text() == (FOLDER / "tool_calls" / name).read_text()


def test_no_held_out_sentence_is_trained_on_and_some_of_their_names_are_new():
    train, heldout = sentences("train"), sentences("heldout")
    assert len(heldout) >= 50 and not train & heldout
    words = {word for sentence in train for word in sentence.split()}
    assert len({word for sentence in heldout for word in sentence.split()} - words) >= 5
