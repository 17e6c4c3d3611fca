"""The data of recipes/smollm2-135m: what its generators write anywhere, a pair's answers, and what is held out."""

import json
import runpy

import pytest

from testing.ranks import REPOSITORY

FOLDER = REPOSITORY / "recipes/smollm2-135m"
GENERATORS = {name: runpy.run_path(str(FOLDER / f"{name}.py")) for name in ("tool_calls", "one_sentence")}
sentences = GENERATORS["one_sentence"]["sentences"]


def rows(name):
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", GENERATORS)
def test_the_generator_writes_the_committed_files(name, tmp_path, monkeypatch):
    monkeypatch.setitem(GENERATORS[name]["main"].__globals__, "FOLDER", tmp_path / "made")
    GENERATORS[name]["main"]()
    for file in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / "made" / file).read_text() == (FOLDER / name / file).read_text()


def test_no_held_out_tool_call_is_trained_on_and_some_of_their_names_are_new():
    parts = (rows(f"tool_calls/{part}") for part in ("train", "heldout"))
    train, heldout = ({row["messages"][1]["content"] for row in part} for part in parts)
    assert len(heldout) >= 50 and not train & heldout
    words = {word for sentence in train for word in sentence.split()}
    assert len({word for sentence in heldout for word in sentence.split()} - words) >= 5


@pytest.mark.parametrize("name, count", [("train", 240), ("heldout", 24)])
def test_the_better_answer_is_the_first_of_the_three_sentences_of_the_worse_one(name, count):
    pairs = rows(f"one_sentence/{name}")
    assert len(pairs) == len({pair["prompt"] for pair in pairs}) == count
    for pair in pairs:
        first, *others = sentences(pair["rejected"])
        assert sentences(pair["chosen"]) == [first] and len(others) == 2


def test_no_held_out_answer_is_trained_on():
    train, heldout = ({pair["chosen"] for pair in rows(f"one_sentence/{part}")} for part in ("train", "heldout"))
    assert not train & heldout


@pytest.mark.parametrize("text, count", [
    ("It is red.", 1),
    ("It is 3.5 m long, e.g. here.", 1),
    ("It is red. It is old.", 2),
    ('"It is red." It is old!', 2),
    ("Steps:\n\n1. Go\n2. Stay", 3),
])  # fmt: skip
def test_sentences_end_at_a_mark_before_a_capital_or_at_a_lines_end(text, count):
    assert len(sentences(text)) == count
