"""Benchmark tasks as far as no lm_eval is needed: who may name them, what is refused, and what a run keeps and shows of them."""

import importlib.util
import json

import pytest

from brigade.report import facts, page, records
from brigade.train.host.cluster import world_from_environment
from brigade.train.recipe import flags
from brigade.train.recipe.files import REPOSITORY
from brigade.train.recipe.program import check_code
from brigade.train.step import preflight, task_evaluation
from brigade.train.strategy import choose, refusal
from testing.recorded import write_run

RECIPE = ["--recipe", str(REPOSITORY / "recipes/tiny/full.yaml")]
FIGURE = {"task": "my_task", "metric": "acc", "filter": "none", "value": 0.5, "stderr": 0.1, "samples": 25, "shots": 0,
          "chat_template": False, "limit": None, "lm_eval": "0.4.13"}  # fmt: skip


@pytest.fixture
def without_package(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "lm_eval" else find(name, *rest)
    )


def test_without_lm_eval_a_run_ends_before_its_model_is_built(without_package, user_error):
    settings = flags.load([*RECIPE, "--eval_tasks", "hellaswag"])
    world = world_from_environment({})
    error = user_error(preflight.check_host, settings, choose(settings, world), world)
    assert error.place == "flag --eval_tasks"
    assert "not installed" in error.problem and "pip install" in error.cure


def test_without_lm_eval_the_verb_names_the_command(without_package, tmp_path, prints):
    run = write_run(tmp_path / "run")
    (run / "model.safetensors").touch()
    assert "pip install -r requirements-eval.txt" in prints(2, "eval", str(run), "--tasks", "hellaswag")
    assert (REPOSITORY / "requirements-eval.txt").is_file()


@pytest.mark.parametrize("words, flag", [
    (["--tasks", "hellaswag", "--exact", "0.8"], "exact"), (["--tasks", "hellaswag", "--answers", "0"], "answers"),
    (["--limit", "5"], "limit"), (["--chat_template"], "chat_template"), (["--batch_size", "2"], "batch_size"),
])  # fmt: skip
def test_a_flag_that_would_not_be_read_is_refused(words, flag, tmp_path, prints):
    assert f"flag --{flag}" in prints(2, "eval", str(tmp_path), *words)


def test_a_task_file_is_taken_from_the_command_line_but_not_from_a_file_that_may_be_a_strangers(tmp_path, mistake):
    text = (REPOSITORY / "recipes/tiny/full.yaml").read_text()
    recipe = tmp_path / "full.yaml"
    recipe.write_text(f"{text}\n  eval_tasks: [./theirs.yaml]\n")  # its last section is training
    settings = flags.load(["--recipe", str(recipe)])
    assert settings.recipe.training.eval_tasks == ["./theirs.yaml"]
    assert "can run Python code" in mistake(check_code, settings)
    check_code(flags.load(["--recipe", str(recipe), "--eval_tasks", "./theirs.yaml"]))
    check_code(flags.load(["--recipe", str(recipe), "--eval_tasks", "hellaswag,arc_easy"]))


def test_a_pipeline_is_refused_with_the_way_that_there_is():
    row = refusal(stages=True, eval_tasks=True, kind="ddp", method="full")
    assert row and row["key"] == "eval_tasks" and "--tasks" in row["cure"]
    assert refusal(stages=True, eval_tasks=False, kind="ddp", method="full") is None


def test_a_figure_replaces_the_same_one_and_no_other(tmp_path):
    task_evaluation.store([FIGURE], 4, tmp_path)
    file = tmp_path / "task_results.jsonl"
    file.write_text(file.read_text() + "{half a line\n")
    others = [FIGURE | {"chat_template": True}, FIGURE | {"limit": 5}, FIGURE | {"metric": "acc_norm"}]
    task_evaluation.store([FIGURE | {"value": 0.75}, *others], 4, tmp_path)
    task_evaluation.store([FIGURE], 8, tmp_path)
    kept = list(map(json.loads, file.read_text().splitlines()))
    assert [(record["step"], record["value"]) for record in kept] == [(4, 0.75), (4, 0.5), (4, 0.5), (4, 0.5), (8, 0.5)]


def test_lm_evals_results_become_figures(monkeypatch):
    results = {
        "results": {"t": {"alias": "t", "acc,none": 0.25, "acc_stderr,none": 0.1, "exact_match,strict-match": 0.5,
                          "exact_match_stderr,strict-match": "N/A"}},
        "n-samples": {"t": {"original": 9, "effective": 4}},
        "n-shot": {"t": 5},
    }  # fmt: skip
    monkeypatch.setattr(task_evaluation, "version", lambda _: "0.4.13")
    first, second = task_evaluation.records(results, True, 4)
    assert (first["metric"], first["value"], first["stderr"], first["samples"], first["shots"]) == (
        "acc",
        0.25,
        0.1,
        4,
        5,
    )
    assert (second["filter"], second["value"], second["stderr"]) == ("strict-match", 0.5, None)
    assert first["chat_template"] is True and first["limit"] == 4


def test_the_page_shows_figures_of_tasks_where_there_are_any(tmp_path):
    run = write_run(tmp_path / "run", steps=20)
    assert 'id="tasks"' not in page.html(records.read_records([run]))
    task_evaluation.store([FIGURE, FIGURE | {"limit": 5, "samples": 5, "chat_template": True}], 20, run)
    read = records.read_records([run])
    head, rows = facts.tasks(read[0])
    whole, part = (dict(zip(head, row, strict=True)) for row in rows)
    assert (whole["value"], whole["samples"], whole["prompts"]) == (0.5, "25", "plain")
    assert (part["samples"], part["prompts"]) == ("5, the first only", "chat template")
    assert 'id="tasks"' in page.html(read) and "my_task" in page.html(read)
