"""A mistake in a recipe of preferences is told with one short message, before the model is built."""

import json

import pytest

from testing import marks, preferences, runs
from testing.preferences import MIXTURE, MODEL, NAMED, REWARD, SECOND, Case

OWN = """
from brigade.train.loss.objective.contract import Result

def mean(pairs, options):
    return Result((pairs.chosen - pairs.rejected).mean(), {})
"""
DPO = ["--objective", "dpo"]
# What else is told of an objective and its keys: tests/unit/test_objectives.py.
PAIRS = {
    # name: flags, words of the message
    "no file of an objective": (["--objective", "none.py:loss"], ["--objective", "there is no file none.py"]),
    "an objective's mean": (["--objective", "own.py:mean"], ["of 1000 pairs, losses has the shape ()", "for each pair"]),
    "a key of another objective": ([*DPO, "--simpo_gamma", "1"], ["--simpo_gamma", "dpo does not read it", "simpo"]),
    "replicas that train independently": ([*DPO, "--sync_every", "4"], ["--sync_every"]),
    "a reference of another architecture": ([*DPO, "--reference", MIXTURE], ["--reference", "qwen3_moe", "llama"]),
    "a reference with more tokens": ([*DPO, "--reference", "wide"], ["--reference", "4,097 tokens", "4,096"]),
    "a reference with other tokens": ([*DPO, "--reference", "swapped"], ["--reference", "2 tokens differ", "the reference's"]),
    "no such reference": ([*DPO, "--reference", "nowhere"], ["--reference", "'nowhere'"]),
    "a reward model's tiles": (["--objective", "reward", "--tiled_loss", "24"], ["--tiled_loss", "no logits"]),
    "a padded reward model": (["--objective", "reward", "--padding_free", "false"], ["--padding_free", "end to end"]),
}  # fmt: skip
QUICK = (
    "no file of an objective",
    "an objective's mean",
    "a key of another objective",
    "a reference with other tokens",
)


@pytest.fixture
def inputs(place):
    """The rows and models of preferences beside good.jsonl; own.py, a model with one more token, and one with two of
    them swapped."""
    preferences.write_inputs(place)
    runs.write_model(place / MIXTURE, MIXTURE)
    (place / "own.py").write_text(OWN)
    (place / "wide").mkdir()
    config = json.loads((place / MODEL / "config.json").read_text()) | {"vocab_size": 4097}
    (place / "wide" / "config.json").write_text(json.dumps(config))
    runs.swap_tokens(runs.write_model(place / "swapped", "llama"), "the", "def")
    return place


@pytest.mark.parametrize("name", marks.cases(*QUICK, slow=[name for name in PAIRS if name not in QUICK]))
def test_mistake_is_told_before_the_model_is_built(name, inputs, told):
    flags, words = PAIRS[name]
    of_rows = ["--train_file", "pairs-train.jsonl", "--validation_file", "pairs-heldout.jsonl"]
    model = REWARD if "reward" in flags else MODEL
    message = told("--recipe", "preferences.yaml", "--model_name_or_path", model, *of_rows, *flags)
    for word in words:
        assert word in message, message
    assert not (inputs / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("variant", [SECOND, NAMED])
@pytest.mark.parametrize("strategy", ["zero1_tp2", "zero1_pp2", "fsdp2_ep2"])
def test_no_second_model_beside_one_that_is_divided(strategy, variant, tmp_path):
    preferences.write_inputs(tmp_path)
    runs.write_model(tmp_path / MIXTURE, MIXTURE)
    case = Case("sigmoid", strategy, 2, variant)
    found, done = runs.run_all(2, [case.run(tmp_path)], tmp_path, 300)
    assert not found and done.returncode == 2
    assert "divides the model that is trained, and no second one beside it" in done.stderr
    assert "  cure: compute its log-probabilities in a run under ZeRO or FSDP2: they are kept" in done.stderr
