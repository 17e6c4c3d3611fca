"""What pages under docs/ take from code and tests, and that none was left half-written."""

import re

import pytest

from brigade.recipe import flags
from brigade.recipe.files import REPOSITORY
from brigade.strategy import refusal
from testing import parity
from tests.ranks import test_export, test_methods, test_rehearsal

PAGES = sorted(REPOSITORY.glob("docs/*.md"))
COLUMNS = {
    "LoRA": "lora",
    "LoRA on some layers": "parts",
    "DoRA": "dora",
    "QLoRA": "qlora",
    "QDoRA": "qdora",
    "LoRA, LAMB": "lora+lamb",
    "LoRA, LARS": "lora+lars",
}


def rehearsed():
    """(method, strategy) of what is rehearsed in bf16 with activation checkpointing; of recipes, one card's are DDP here."""
    found = {(method, strategy) for method, strategies in test_methods.REHEARSED.items() for strategy in strategies}
    for path in test_rehearsal.RECIPES:
        training = flags.load(["--recipe", str(REPOSITORY / path)]).recipe.training
        _, _, method, *_, strategy, checkpointing, _ = test_rehearsal.rehearsed(path)
        if training.bf16 and checkpointing:
            found.add((method, "ddp" if strategy == "single" else strategy))
    return found


def cell(method, strategy, rehearsals):
    if refusal(method=method, optim=method.rpartition("+")[2], kind=strategy.partition("_")[0]):
        return "refused"
    exported = f"{method}-{strategy}" in test_export.FOUR
    words = ["proven"] * (strategy in test_methods.UNDER[method]) + ["exported"] * exported
    return ", ".join(words + ["rehearsed"] * ((method, strategy) in rehearsals)) or "-"


def table():
    rehearsals = rehearsed()
    lines = [["strategy", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    for strategy in parity.STRATEGIES:
        lines.append([strategy, *(cell(method, strategy, rehearsals) for method in COLUMNS.values())])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_the_table_of_methods_is_what_the_tests_of_methods_run():
    assert set(COLUMNS.values()) == set(test_methods.METHODS)
    assert table() in (REPOSITORY / "docs/methods.md").read_text(), f"docs/methods.md should hold\n{table()}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_page_has_a_placeholder_left(path):
    """Words that stand for what was to be written. Braces in code are somebody's configuration."""
    prose = re.sub(r"```.*?```|`[^`]*`|^ {4}.*$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"^\s*[A-Z]{4,}\s*$|\b(?:TODO|TBD|FIXME|XXX)\b|\{\w+\}", prose, flags=re.MULTILINE)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_links_to_are_there(path):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target
