"""The data of recipes/smollm2-135m/dpo.yaml: what its generator writes anywhere, a pair's answers, and what is held out."""

import json
import runpy

import pytest

from testing.ranks import REPOSITORY

FOLDER = REPOSITORY / "recipes/smollm2-135m"
GENERATOR = runpy.run_path(str(FOLDER / "one_sentence.py"))
sentences = GENERATOR["sentences"]


def rows(name):
    return [json.loads(line) for line in (FOLDER / f"one_sentence/{name}.jsonl").read_text().splitlines()]


def test_the_generator_writes_the_committed_files(tmp_path, monkeypatch):
    monkeypatch.setitem(GENERATOR["main"].__globals__, "FOLDER", tmp_path / "made")
    GENERATOR["main"]()
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / "made" / name).read_text() == (FOLDER / "one_sentence" / name).read_text()


@pytest.mark.parametrize("name, count", [("train", 240), ("heldout", 24)])
def test_the_better_answer_is_the_first_of_the_three_sentences_of_the_worse_one(name, count):
    pairs = rows(name)
    assert len(pairs) == len({pair["prompt"] for pair in pairs}) == count
    for pair in pairs:
        first, *others = sentences(pair["rejected"])
        assert sentences(pair["chosen"]) == [first] and len(others) == 2


def test_no_held_out_answer_is_trained_on():
    assert not {pair["chosen"] for pair in rows("train")} & {pair["chosen"] for pair in rows("heldout")}


@pytest.mark.parametrize("text, count", [
    ("It is red.", 1),
    ("It is 3.5 m long, e.g. here.", 1),
    ("It is red. It is old.", 2),
    ('"It is red." It is old!', 2),
    ("Steps:\n\n1. Go\n2. Stay", 3),
])  # fmt: skip
def test_sentences_end_at_a_mark_before_a_capital_or_at_a_lines_end(text, count):
    assert len(sentences(text)) == count
