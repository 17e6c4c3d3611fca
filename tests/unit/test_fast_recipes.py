"""full.yaml and lora.yaml are the fast choice for the cluster that they name."""

import pytest
import yaml

from benchmarks.fast_recipes import ahead, choice_for
from brigade.plan.choice.job_of_recipe import load_plan
from brigade.plan.choice.search import NEAR
from brigade.plan.hardware import calibration
from brigade.train.recipe.files import REPOSITORY
from testing.shipped import shipped

PLAIN = [
    path
    for name in ("full", "lora")
    for path in shipped(f"recipes/*/{name}.yaml")
    if yaml.safe_load(path.read_text()).get("cluster", {}).get("gpu")
]


@pytest.mark.parametrize("recipe", PLAIN, ids=lambda path: path.parent.name + "-" + path.stem)
def test_a_plain_recipe_is_as_fast_as_what_plan_chooses_there(recipe, monkeypatch):
    """Among strategies without a further axis; docs/evidence/recipes.md says where one would be faster."""
    monkeypatch.setenv(calibration.VARIABLE, "")
    plan = load_plan(recipe)
    assert ahead(plan, choice_for(plan, axes=False)) <= NEAR


def test_a_recipe_of_another_name_may_be_slower(monkeypatch):
    monkeypatch.setenv(calibration.VARIABLE, "")
    plan = load_plan(REPOSITORY / "recipes/qwen3-8b/full-low-memory.yaml")
    assert ahead(plan, choice_for(plan, axes=False)) > NEAR
