"""Choosing held-out questions, keeping answers, stopping early, and what these need of a recipe; benchmark tasks as far as no
lm_eval is needed."""

import importlib.util
import json
import math
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken

from brigade import eval as evaluation
from brigade.errors import UserError
from brigade.report import facts, page, records
from brigade.train.host.cluster import world_from_environment
from brigade.train.recipe import flags
from brigade.train.recipe.files import REPOSITORY
from brigade.train.recipe.program import check_code
from brigade.train.run import best_checkpoint
from brigade.train.step import preflight, progress, sample_answers, task_evaluation
from brigade.train.step.evaluation import EarlyStopping, forget_other_samples
from brigade.train.strategy import choose, refusal
from testing.recorded import write_run

CHAT = {"input_ids": [1, 5, 2, 1, 6, 7, 2, 9, 1, 8, 2], "labels": [-100] * 4 + [6, 7, 2] + [-100] * 2 + [8, 2]}
TEXT = {"input_ids": [3, 4, 5, 6, 7], "labels": [-100, 4, 5, 6, 7]}


def settings(*words):
    return flags.load(["--eval_steps", "10", "--save_steps", "20", *words])


@pytest.mark.parametrize("loss, recorded, half, same", [
    (0.017351, 0.016999, True, True),  # of the demo's model: 2.1 %, and no more than rounding
    (0.017351, 0.016999, False, False),
    (0.0190, 0.0170, True, False),
    (2.53, 2.50, True, True),
    (2.56, 2.50, True, False),
    (2.5003, 2.5, False, False),
])  # fmt: skip
def test_the_loss_of_a_saved_model_is_the_runs_but_for_rounding(loss, recorded, half, same):
    assert evaluation.agree(loss, recorded, half) is same


def test_a_chat_is_asked_up_to_its_first_answer_and_a_text_up_to_its_half():
    assert sample_answers.question("a", CHAT) == sample_answers.Question("a", [1, 5, 2, 1], [6, 7, 2])
    assert sample_answers.question("a", TEXT) == sample_answers.Question("a", [3, 4], [5, 6, 7])
    shortest = {"input_ids": [3, 4], "labels": [-100, 4]}
    assert sample_answers.question("a", shortest) == sample_answers.Question("a", [3], [4])


@pytest.mark.parametrize(("wanted", "names"), [(1, "a"), (3, "aba"), (5, "abaaa"), (9, "abaaa")])
def test_questions_are_spread_over_the_sources(wanted, names):
    chosen = sample_answers.choose({"a": [CHAT] * 4, "b": [TEXT]}, wanted)
    assert "".join(asked.source for asked in chosen) == names


def test_an_answer_ends_where_the_model_the_tokenizer_or_the_reference_end_one():
    added = {0: AddedToken("</s>", special=True), 2: AddedToken("<|eot_id|>", special=True), 6: AddedToken("<tool>")}
    added[3] = AddedToken("</call>", special=True)
    tokenizer = SimpleNamespace(eos_token_id=0, added_tokens_decoder=added)
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[0, 30]))
    asked = [sample_answers.Question("a", [1], reference) for reference in ([6, 2], [6, 2, 9], [2, 6, 7, 8])]
    first, second = (sample_answers.stops(model, tokenizer, rows) for rows in (asked[:1], asked[1:]))
    assert first == second == {0, 2, 30}
    assert sample_answers.stops(model, tokenizer, asked[2:]) == {0, 30}
    calls = sample_answers.Question(
        "a", [1], [6, 3, 7, 3, 2]
    )  # each ends with a special token, before that of the turn
    assert sample_answers.stops(model, tokenizer, [calls]) == {0, 2, 30}
    model.generation_config.eos_token_id = tokenizer.eos_token_id = None
    assert sample_answers.stops(model, tokenizer, asked[2:]) == set()


def entry(step, answer):
    return {"step": step, "source": "a", "question": "what\nis [bold] | this?", "reference": "é", "answer": answer}


def test_answers_of_an_interrupted_run_give_way(tmp_path):
    for step, answer in [(1, "x"), (2, "y"), (3, "z"), (2, "again")]:
        sample_answers.store([entry(step, answer), entry(step, "second")], tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(line["step"], line["answer"]) for line in lines] == [(1, "x"), (1, "second"), (2, "again"), (2, "second")]


def test_answers_are_shown_as_they_are(capsys):
    sample_answers.show([entry(1, "[red]no markup[/wrong]"), entry(1, "x" * 300)])
    out = capsys.readouterr().out
    assert "what is [bold] | this?" in out and "[red]no markup[/wrong]" in out and "x" * 241 not in out
    assert "is [bold] \\| this?" in sample_answers.markdown([entry(1, "y")])


def test_a_line_of_progress_shows_perplexity_and_each_source():
    logs = {
        "eval_loss": 2.0,
        "eval_perplexity": math.exp(2),
        "eval_my_chats_loss": 1.0,
        "eval_my_chats_perplexity": math.e,
    }
    words = "step 3/9  held-out loss 2.0000  ppl 7.39  my_chats 1.0000 ppl 2.72"
    assert "  ".join(progress.figures(3, 9, logs)) == words
    assert progress.figures(3, 9, {"train_loss": 1.0}) == []
    ranks = {"tokens_per_second": 300.0, "tokens_per_second_per_gpu": 150.0, "token_spread": 4.0}
    assert progress.figures(1, 9, ranks)[1:] == ["300 tokens/s", "150 per rank", "ranks' tokens differ 4 %"]
    assert progress.figures(1, 9, dict.fromkeys(list(ranks)[:2], 300.0)) == ["step 1/9", "300 tokens/s"]


def stops_at(losses, stopping):
    control = SimpleNamespace(should_training_stop=False)
    for step, loss in enumerate(losses, stopping.seen):
        stopping.seen = step + 1
        state = SimpleNamespace(global_step=step, max_steps=99, is_world_process_zero=True)
        stopping.on_evaluate(None, state, control, {"eval_loss": loss})
        if control.should_training_stop:
            return step
    return None


def test_early_stopping_counts_evaluations_without_a_better_loss(capsys):
    losses = [1.0, 5.0, 4.0, 4.0, 3.9, math.nan, 3.95, 3.0]  # the first is of the untrained model
    for patience, step in [(1, 3), (2, 6), (3, None)]:
        stopping = EarlyStopping(patience)
        stopping.seen = 0
        assert stops_at(losses, stopping) == step
    assert "Stopping at step 6 of 99: no held-out loss below 3.9000 in 2 evaluations." in capsys.readouterr().out


def test_early_stopping_goes_on_counting_after_a_resume():
    stopping = EarlyStopping(2)
    stopping.seen = 1
    assert stops_at([2.0, 3.0], stopping) is None
    kept = json.loads(json.dumps(stopping.state()))
    resumed = EarlyStopping(**kept["args"])
    resumed.__dict__.update(kept["attributes"], seen=3)
    assert stops_at([2.5], resumed) == 3
    control = SimpleNamespace(should_training_stop=False)
    resumed.on_epoch_begin(None, None, control)  # it died after the checkpoint with which it stopped
    assert control.should_training_stop


@pytest.mark.parametrize(("logged", "evaluated"), [({"eval_samples": 20}, 5), ({}, 5), ({"eval_samples": 5}, 20)])
def test_a_best_loss_of_other_samples_is_forgotten(logged, evaluated, capsys):
    stopping = EarlyStopping(2)
    stopping.best, stopping.without = 2.5, 1
    state = SimpleNamespace(log_history=[{"eval_loss": 2.5} | logged, {"loss": 1.0}], is_world_process_zero=True)
    state.best_metric, state.best_model_checkpoint, state.best_global_step = 2.5, "o/checkpoint-1", 1
    same = logged.get("eval_samples", 20)
    forget_other_samples(state, [stopping], {"eval_samples": same}, 20)
    assert (state.best_metric, stopping.best, stopping.without, capsys.readouterr().out) == (2.5, 2.5, 1, "")
    forget_other_samples(state, [stopping], {"eval_samples": evaluated}, 20)
    assert (state.best_metric, state.best_model_checkpoint, state.best_global_step) == (None, None, None)
    assert (stopping.best, stopping.without) == (math.inf, 0)
    assert f"of {evaluated} samples from here on, and were of {same}" in capsys.readouterr().out


@pytest.mark.parametrize("words, place, problem", [
    (["--load_best_model_at_end", "--save_steps", "15"], "flag --save_steps", "save_steps 15 .* eval_steps 10"),
    (["--early_stopping_patience", "2", "--save_steps", "5"], "flag --save_steps", "save_steps 5 .* eval_steps 10"),
    (["--early_stopping_patience", "2", "--eval_steps", "null"], "flag --early_stopping_patience", "eval_steps is null"),
    (["--load_best_model_at_end", "--save_steps", "null"], "flag --load_best_model_at_end", "save_steps is null"),
])  # fmt: skip
def test_checkpoints_and_evaluations_must_meet(words, place, problem):
    with pytest.raises(UserError, match=problem) as caught:
        best_checkpoint.check(settings(*words))
    assert caught.value.place == place


def test_without_either_key_they_need_not_meet():
    for words in ([], ["--load_best_model_at_end"], ["--early_stopping_patience", "1", "--save_steps", "null"]):
        best_checkpoint.check(settings(*words))
    best_checkpoint.check(settings("--save_steps", "7"))


def test_the_end_of_a_run_tells_of_the_best_checkpoint():
    state = SimpleNamespace(
        global_step=3,
        max_steps=6,
        best_model_checkpoint="o/checkpoint-1",
        best_global_step=1,
        best_metric=2.5,
        log_history=[{"eval_loss": 4.0, "step": 0}, {"eval_loss": 2.5, "step": 1}, {"loss": 1.0, "step": 2}],
    )
    early = settings("--load_best_model_at_end", "--early_stopping_patience", "2")
    assert best_checkpoint.saved_step(early, state) == 1 and best_checkpoint.saved_step(settings(), state) == 3
    assert best_checkpoint.closing_lines(early, state, 4.0, 2.5) == [
        "Stopped early at step 3 of 6.",
        "Best held-out loss of a checkpoint: 2.5000 at step 1: o/checkpoint-1.",
        "Held-out loss 4.0000 before, 2.5000 after 1 step.",
    ]
    state.log_history.append({"eval_loss": 2.25, "step": 2})
    assert "Step 2 had 2.2500, and was not saved" in best_checkpoint.closing_lines(early, state, 4.0, 2.5)[2]
    state.best_model_checkpoint = None
    assert best_checkpoint.closing_lines(settings(), state, None, 2.5) == ["Held-out loss 2.5000 after 3 steps."]


# ---- benchmark tasks -------------------------------------------------------------------------------------------------
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
    assert [first[key] for key in ("metric", "value", "stderr", "samples", "shots")] == ["acc", 0.25, 0.1, 4, 5]
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
