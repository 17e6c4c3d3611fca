"""Learning-rate schedules: what a recipe may say of them is judged before anything is loaded, and all that is taken runs."""

import inspect
from types import SimpleNamespace

import pytest
import transformers
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_utils import SchedulerType

from brigade.train.recipe import flags
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.recipe.schedules import ARGUMENTS, check_last_rate
from brigade.train.step.schedule import check_phases, rate, schedule_arguments

OURS = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}  # what Trainer gives them
UNSUPPORTED = {"reduce_lr_on_plateau", "greedy"}  # they go by the held-out loss


def run_of(settings):
    batch = batch_arithmetic(settings.recipe.training, 1, "place")
    return SimpleNamespace(settings=settings, batch=batch)


def test_the_table_has_every_schedule_and_argument_of_transformers():
    assert ARGUMENTS.keys() == {kind.value for kind in SchedulerType} - UNSUPPORTED
    for name, arguments in ARGUMENTS.items():
        theirs = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters.keys() - OURS
        assert arguments.keys() == theirs, name


TAKEN = [
    ("linear", "{}"), ("cosine", "{}"), ("cosine", "{num_cycles: 1}"), ("cosine_with_restarts", "{num_cycles: 2}"),
    ("cosine_with_min_lr", "{min_lr: 1e-7}"), ("cosine_with_min_lr", "{min_lr_rate: 1e-1}"),
    ("cosine_warmup_with_min_lr", "{min_lr_rate: 0.1, warmup_lr_rate: 0.2}"), ("constant_with_warmup", "{}"),
    ("inverse_sqrt", "{}"), ("inverse_sqrt", "{timescale: 1e1}"), ("polynomial", "{lr_end: 1e-7}"), ("polynomial", "{power: 2}"),
    ("warmup_stable_decay", "{}"), ("warmup_stable_decay", "{num_decay_steps: 0.5}"),
    ("warmup_stable_decay", "{num_decay_steps: 30, num_stable_steps: 50, decay_type: 1-sqrt, min_lr_ratio: 0.1}"),
]  # fmt: skip


@pytest.mark.parametrize("name, arguments", TAKEN)
def test_what_is_taken_is_computed_at_every_step(load, name, arguments):
    settings = load("--lr_scheduler_type", name, "--lr_scheduler_kwargs", arguments, "--warmup_steps", "10")
    training, run = settings.recipe.training, run_of(settings)
    check_last_rate(training, training.learning_rate, settings.place)
    check_phases(run, 100)
    rates = [rate(run, 100, step) for step in (1, 11, 50, 100, 101)]
    assert max(rates) == pytest.approx(training.learning_rate, rel=1e-3) and min(rates) >= 0
    assert (
        transformers.TrainingArguments(lr_scheduler_kwargs=schedule_arguments(run, 100)).lr_scheduler_kwargs is not None
    )


def test_the_last_tenth_decays_unless_something_else_is_said(load):
    run = run_of(load("--lr_scheduler_type", "warmup_stable_decay"))
    assert schedule_arguments(run, 200) == {"num_decay_steps": 20}
    assert schedule_arguments(run, 3) == {"num_decay_steps": 1}
    assert rate(run, 200, 180) == run.batch.learning_rate > rate(run, 200, 190) > rate(run, 200, 200) > 0


REFUSED = {
    # name, arguments -> words of the problem and the cure
    ("cosine", "{min_lr_rate: 0.1}"): ["cosine takes no argument 'min_lr_rate'", "cosine_with_min_lr"],
    ("linear", "{num_cycles: 2}"): ["linear takes no argument 'num_cycles'", "leave num_cycles out"],
    ("constant", "{nothing: 2}"): ["constant takes no argument 'nothing'", "takes no arguments"],
    ("polynomial", "{lr_ends: 1}"): ["'lr_ends'", "'lr_end'"],
    ("polynomial", "{lr_end: much}"): ["lr_end is 'much'", "a number from 0"],
    ("polynomial", "{lr_end: 1}"): ["lr_end is 1", "2e-05", "below"],
    ("cosine_with_min_lr", "{}"): ["either min_lr or min_lr_rate", "neither"],
    ("cosine_with_min_lr", "{min_lr: 0, min_lr_rate: 0}"): ["either min_lr or min_lr_rate", "both"],
    ("cosine_with_min_lr", "{min_lr_rate: 10}"): ["min_lr_rate is 10", "0 to 1"],
    ("warmup_stable_decay", "{num_decay_steps: 2.5}"): ["num_decay_steps is 2.5", "a share"],
    ("warmup_stable_decay", "{decay_type: exp}"): ["decay_type is 'exp'", "1-sqrt"],
    ("warmup_stable_decay", "{num_decay_steps: 95}"): ["10 steps of warm-up, 95 of decay", "100 steps"],
    ("warmup_stable_decay", "{num_decay_steps: 5, num_stable_steps: 5}"): ["would be 0", "leave num_stable_steps out"],
    ("cosine", "{last_epoch: 3}"): ["'last_epoch'"], ("cosine", "{num_cycles: true}"): ["num_cycles is True"],
    ("cosine", "{num_cycles: .inf}"): ["num_cycles is inf"], ("cosine", "{1: 2}"): ["not a table whose keys are words"],
    ("constant", "{}"): ["constant has no warm-up", "warmup_steps is 10", "constant_with_warmup"],
}  # fmt: skip


@pytest.mark.parametrize("name, arguments", REFUSED)
def test_what_a_schedule_cannot_use_is_refused_by_name(load, mistake, name, arguments):
    def judge():
        settings = load("--lr_scheduler_type", name, "--lr_scheduler_kwargs", arguments, "--warmup_steps", "10")
        check_last_rate(settings.recipe.training, settings.recipe.training.learning_rate, settings.place)
        check_phases(run_of(settings), 100)

    message = mistake(judge)
    assert "flag --lr_scheduler" in message and all(word in message for word in REFUSED[name, arguments]), message


def test_a_warm_up_as_long_as_the_run_leaves_a_polynomial_nothing(load, mistake):
    run = run_of(load("--lr_scheduler_type", "polynomial", "--warmup_steps", "10"))
    assert "polynomial cannot be computed" in mistake(check_phases, run, 10)


def test_lint_says_it_too(check, write_recipe):
    for training in (
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1}},
    ):
        path = write_recipe(training=training)
        (found,) = [one for one in check({"full.yaml": path.read_text()}).findings if one.severity == "error"]
        assert found.at == "training.lr_scheduler_kwargs" and found.rule == "recipe-invalid"


@pytest.mark.parametrize("text, number", [
    ("1e-7", 1e-7), ("5E8", 5e8), ("1.5e5", 1.5e5), ("-2.e3", -2e3), ("1e", "1e"), ("v1e5", "v1e5"), ("[1e3]", [1e3]),
])  # fmt: skip
def test_numbers_that_yaml_takes_for_texts(load, write_recipe, text, number):
    inside = f"{{a: {{b: {text}}}}}"
    assert load("--ds_config", inside).recipe.cluster.ds_config == {"a": {"b": number}}
    path = write_recipe(write_recipe().read_text() + f"cluster: {{accelerate_config: {inside}}}\n")
    assert flags.load(["--recipe", str(path)]).recipe.cluster.accelerate_config == {"a": {"b": number}}


def test_a_table_without_end(write_recipe, mistake):
    path = write_recipe(write_recipe().read_text() + "cluster: {ds_config: &x {a: *x}}\n")
    assert "a table that has an end" in mistake(flags.load, ["--recipe", str(path)])
