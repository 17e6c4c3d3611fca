"""What CONTRIBUTING asks of who adds a key, an objective or an optimizer: without it a key does silently nothing, and the others
would be trained and never compared."""

import re

import pytest

from benchmarks import preferences
from brigade.train.recipe.data_section import DataSection
from brigade.train.recipe.files import REPOSITORY, read_yaml
from brigade.train.recipe.model_section import ModelSection
from brigade.train.recipe.objectives import DISTILL, OBJECTIVES
from brigade.train.recipe.training_section import OWN_OPTIMIZERS, TrainingSection
from brigade.train.strategy.state_bytes import OPTIMIZER_BYTES
from testing import distilling, plain_preferences
from testing.preferences import FORMS


def test_every_key_of_a_recipe_is_read_by_its_name():
    """Transformers' own keys are handed on by `SAME` in step/arguments.py. One that nothing names changes no run."""
    declared = {"model_section.py", "data_section.py", "training_section.py", "objectives.py"}
    code = "\n".join(path.read_text() for path in REPOSITORY.glob("brigade/**/*.py") if path.name not in declared)
    keys = {key for section in (ModelSection, DataSection, TrainingSection) for key in section.model_fields}
    assert keys <= set(re.findall(r"""(?<=\.)\w+|(?<=["'])\w+(?=["'])""", code))


@pytest.mark.parametrize("name", [name for name, objective in OBJECTIVES.items() if objective.compares])
def test_an_objective_is_compared_with_its_formula_with_trl_and_under_each_strategy(name):
    forms = set(OBJECTIVES[name].loss_types or (name,))
    known = plain_preferences.PAIRS.keys() | plain_preferences.JUDGED.keys()
    assert forms <= known, "its formula, written a second time: testing/plain_preferences.py"
    tried = {form for form, keys in FORMS.items() if keys["objective"] == name}
    assert forms <= tried | {FORMS[form].get("loss_type") for form in tried}, "testing/preferences.py: FORMS"
    assert name in {run.keys["objective"] for run in preferences.RUNS.values()}, "benchmarks/preferences.py: RUNS"
    assert name in read_yaml(REPOSITORY / "brigade/plan/output/first_run.yaml")["rates"], (
        "brigade/plan/output/first_run.yaml"
    )


def test_every_divergence_is_compared_with_its_formula():
    tried = {keys.get("loss_type", "forward_kl") for keys in distilling.FORMS.values()}
    assert set(OBJECTIVES[DISTILL].loss_types) <= tried, "testing/distilling.py: FORMS"


@pytest.mark.parametrize("name", TrainingSection.model_fields["optim"].annotation.__args__)
def test_the_planner_counts_an_optimizers_states(name):
    assert name in OPTIMIZER_BYTES, "without a row the planner takes it for AdamW"


@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_an_optimizer_of_ours_is_compared_under_strategies_and_described(name):
    cases = [REPOSITORY / path for path in ("tests/ranks/test_optimizers.py", "testing/parity.py")]
    assert any(f'"{name}"' in path.read_text() for path in cases)
    assert name in (REPOSITORY / "docs/training.md").read_text()
