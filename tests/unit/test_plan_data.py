"""`plan` says how long a recipe takes on its own data, where it knows about how many tokens those have."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from brigade.plan.choice.goals import own_tokens
from brigade.plan.choice.job_of_recipe import load_plan
from brigade.plan.output.header import header

pytestmark = pytest.mark.usefixtures("in_the_repository")


def changed(recipe, section, **keys):
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=keys)})


def test_hours_are_those_of_the_epochs_of_the_recipes_own_data():
    plan = load_plan(Path("recipes/qwen3-8b/lora.yaml"))
    tokens = own_tokens(plan.settings.recipe)
    assert tokens == 18e6  # of 71.9 MB of English
    said = float(re.search(r"([\d.]+) hours for its 18 million tokens", header(plan))[1])
    assert said == pytest.approx(tokens / plan.estimate.tokens_per_second_per_gpu / 3600, abs=0.005)
    assert own_tokens(changed(plan.settings.recipe, "training", num_train_epochs=2.0)) == 2 * tokens


@pytest.mark.parametrize("section, keys", [
    ("data", {"dataset_name": "somebody/else"}),
    ("data", {"dataset_name": None, "train_file": "mine.jsonl"}),
    ("data", {"max_train_samples": 100}),
    ("training", {"max_steps": 10}),
])  # fmt: skip
def test_data_that_nobody_has_counted_get_the_time_of_a_billion_tokens(section, keys):
    plan = load_plan(Path("recipes/qwen3-8b/lora.yaml"))
    recipe = changed(plan.settings.recipe, section, **keys)
    assert own_tokens(recipe) is None
    other = replace(plan.settings, recipe=recipe)
    assert "hours for a billion tokens" in header(replace(plan, settings=other))
