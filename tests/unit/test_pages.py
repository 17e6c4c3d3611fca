"""What pages under docs/ take from committed results and from tests."""

import importlib
import re

import pytest

from benchmarks import pages
from brigade.train.recipe import flags
from brigade.train.recipe.files import REPOSITORY
from brigade.train.strategy import refusal
from testing import exports, methods, parity, rehearsals

PAGES = sorted(REPOSITORY.glob("docs/**/*.md"))
COLUMNS = {
    "LoRA": "lora",
    "LoRA on some layers": "parts",
    "LoRA, tokens": "tokens",
    "LoRA, tokens, two ends": "tokens+untied",
    "QLoRA, tokens": "tokens+qlora",
    "LoRA by patterns, LoRA+": "patterns",
    "DoRA": "dora",
    "QLoRA": "qlora",
    "QDoRA": "qdora",
    "LoRA, LAMB": "lora+lamb",
    "LoRA, LARS": "lora+lars",
}


def rehearsed():
    """(method, strategy) of what is rehearsed in bf16 with activation checkpointing; of recipes, one card's are DDP here."""
    found = {(method, strategy) for method, strategies in methods.REHEARSED.items() for strategy in strategies}
    for path in rehearsals.RECIPES:
        training = flags.load(["--recipe", str(REPOSITORY / path)]).recipe.training
        _, _, method, *_, strategy, checkpointing, _ = rehearsals.rehearsed(path)
        if training.bf16 and checkpointing:
            found.add((method, "ddp" if strategy == "single" else strategy))
    return found


def cell(method, strategy, rehearsals):
    if refusal(method=method, optim=method.rpartition("+")[2], kind=strategy.partition("_")[0]):
        return "refused"
    exported = f"{method}-{strategy}" in exports.FOUR
    words = ["proven"] * (strategy in methods.UNDER[method]) + ["exported"] * exported
    return ", ".join(words + ["rehearsed"] * ((method, strategy) in rehearsals)) or "-"


def table():
    rehearsals = rehearsed()
    lines = [["strategy", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    for strategy in parity.STRATEGIES:
        lines.append([strategy, *(cell(method, strategy, rehearsals) for method in COLUMNS.values())])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_the_table_of_methods_is_what_the_tests_of_methods_run():
    assert set(COLUMNS.values()) == set(methods.METHODS)
    assert table() in (REPOSITORY / "docs/methods.md").read_text(), f"docs/methods.md should hold\n{table()}"


@pytest.mark.parametrize(
    "path",
    # The planner answers hundreds of questions for each of the slow ones.
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.name in ("choosing.md", "planner-questions.md")))
        for path in PAGES
    ],
    ids=[str(path.relative_to(REPOSITORY / "docs")) for path in PAGES],
)
def test_every_table_of_a_page_is_what_its_command_writes(path):
    """test_planner_page.py compares the planner's, which takes longest."""
    commands = {command for _, _, command, *_ in pages.TABLE.findall(path.read_text())}
    for command in commands:
        module = re.fullmatch(r"python -m (benchmarks\.\w+)( --\w+)*", command)
        assert module and hasattr(importlib.import_module(module[1]), "main"), command
    if "python -m benchmarks.planner" not in commands:
        assert pages.from_results(path) == path.read_text(), "run `python -m benchmarks.pages`"


def test_a_table_without_a_marker_is_named():
    text = "<!-- table: one (python -m benchmarks.states) -->\nold\n<!-- end -->\n"
    assert pages.filled(text, {"one": "new"}) == text.replace("old", "new")
    with pytest.raises(KeyError, match="two"):
        pages.filled(text, {"two": "new"})


def test_lines_of_some_models_stand_beside_the_others(monkeypatch, tmp_path):
    module = importlib.import_module("benchmarks.image_parity")
    there = pages.markdown(["model", "ddp"], [["first", "1"], ["third", "3"]])
    (tmp_path / "page.md").write_text(f"<!-- table: t (python -m x) -->\n{there}\n<!-- end -->")
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    new = pages.markdown(["model", "ddp"], [["second", "2"], ["third", "33"]])
    expected = pages.markdown(["model", "ddp"], [["first", "1"], ["second", "2"], ["third", "33"]])
    assert module.beside_others("t", new, ["first", "second", "third"]) == expected
    with pytest.raises(ValueError, match="other columns"):
        module.beside_others("t", pages.markdown(["model", "zero3"], [["first", "1"]]), ["first"])
