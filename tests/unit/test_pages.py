"""What pages under docs/ take from committed results and from tests."""

import importlib
import re

import pytest

from benchmarks import local_steps, pages
from benchmarks.local_steps_tables import until
from benchmarks.network_tables import half_measured, is_noise, shares, volume
from brigade.plan.choice.job_of_recipe import strategy_of
from brigade.train.local.local_steps import OVERLAP
from brigade.train.recipe import flags
from brigade.train.recipe.files import REPOSITORY
from brigade.train.recipe.method import method_of
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
        settings = flags.load(["--recipe", str(REPOSITORY / path)])
        training, strategy = settings.recipe.training, strategy_of(settings).name
        if training.bf16 and training.activation_checkpointing:
            found.add((method_of(settings.recipe.model), "ddp" if strategy == "single" else strategy))
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
        pytest.param(
            path, marks=[pytest.mark.slow] * (path.name in ("choosing.md", "planner-questions.md", "recipes.md"))
        )
        for path in PAGES
    ],
    ids=[str(path.relative_to(REPOSITORY / "docs")) for path in PAGES],
)
def test_every_table_of_a_page_is_what_its_command_writes(path):
    """test_planner_page.py compares the planner's, which takes longest."""
    commands = {command for _, _, command, *_ in pages.TABLE.findall(path.read_text())}
    for command in commands:
        module = re.fullmatch(r"python -m (benchmarks\.\w+)( [\w/-]+)*", command)
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


# ---- docs/evidence/network.md ----------------------------------------------------------------------------------------
def row(rate, share):
    return {"rate": rate, "communication_percent": share, "one_host_seconds": 0.5}


def test_where_half_is_communication_on_the_fastest_link_too_it_is_above_that():
    assert half_measured([row("1gbit", 70), row("100mbit", 90)]) == "> 1000"


@pytest.mark.parametrize("kind, accumulation, shape, elements", [
    ("ddp", 8, (2, 1), 1), ("zero1", 8, (2, 1), 1.5), ("zero2", 8, (2, 1), 8.5), ("zero3", 8, (2, 1), 16),
    ("ddp", 1, (4, 1), 1.5), ("ddp", 1, (2, 2), 1.5),
    ("hsdp", 8, (2, 2), 1), ("hsdp", 8, (4, 1), 16.5),  # groups inside the hosts, and across them
])  # fmt: skip
def test_what_crosses_a_hosts_link(kind, accumulation, shape, elements):
    assert volume(kind, accumulation, *shape) == pytest.approx(elements)


def test_a_share_above_that_on_a_slower_link_is_noise():
    rows = [row("10gbit", 41), row("1gbit", 25), row("200mbit", 70)]
    assert [is_noise(rows, one) for one in rows] == [True, False, False]


def test_the_bars_reach_from_the_fastest_step_to_the_slowest():
    assert shares(row("1gbit", 0) | {"fastest_step": 0.4, "slowest_step": 1.0}) == (0, 50)


# ---- docs/evidence/local-training.md ---------------------------------------------------------------------------------
def test_seconds_are_the_median_of_whole_rounds_wherever_they_begin():
    rounds = [[1, 1, 6, 1, 1], [1, 1, 1, 11, 1], [1, 1, 1, 1, 26]]  # each waits once
    block = {"seconds": [step for each in rounds for step in each], "bytes": 1.9e6}
    found = {"strategy": "DiLoCo, H = 5", "rates": ["1gbit"], "blocks": [block], "parameters": 2_361_024}
    (row,) = local_steps.timed(2, found)
    assert (row["step_seconds"], row["fastest_round"], row["slowest_round"]) == (3, 2, 6)
    assert row["kilobytes_formula"] == pytest.approx(4 * 2_361_024 / 5 / 1e3, abs=0.01)


@pytest.mark.parametrize("name", [name for name, of in local_steps.METHODS.items() if of.every > 1])
def test_rates_change_while_no_fragment_is_on_its_way(name):
    job = local_steps.timed_job(2, name)
    length = job["dropped"] + job["measured"]
    ends = [job["warm_up"] + block * length for block in range(len(job["rates"]) + 1)]
    assert all(end % OVERLAP == 0 for end in ends)
    assert job["measured"] % local_steps.METHODS[name].every == 0
    steps = int(job["flags"][job["flags"].index("--max_steps") + 1])
    assert steps >= ends[-1] + OVERLAP  # in its last steps a run sends no fragment


def test_the_first_tenth_of_powersgds_steps_is_plain():
    def rows(method):
        return [{"method": method, "step": str(step)} for step in (0, 5, 20, 100)]

    assert until(rows("DDP, PowerSGD"), 1, 10) == [0, 50, 110, 190]
    assert until(rows("DiLoCo, H = 5"), 1, 10) == [0, 5, 20, 100]
