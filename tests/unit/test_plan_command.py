"""`python -m brigade plan`: what its flags ask for, and what it says of those it does not know."""

from pathlib import Path

import pytest

from brigade.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def plan(capsys, *words):
    code = main(["plan", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out + err


@pytest.mark.parametrize("words, said", [
    (["qwen3-8b", "--metod", "lora"], "did you mean '--method'?"), (["qwen3-8b", "--metod=lora"], "did you mean '--method'?"),
    (["a", "b", "c"], "'b c': there are more words"), (["qwen3-8b", "--gpu", "H100", "--network", "foo"], "states no rate"),
    (["qwen3-8b", "--gpu", "H100", "--network", "0 Gb/s"], "is no rate"),
])  # fmt: skip
def test_a_mistake_is_named_with_its_cure(capsys, words, said):
    code, text = plan(capsys, *words)
    assert code == 2 and said in text and "cure:" in text
