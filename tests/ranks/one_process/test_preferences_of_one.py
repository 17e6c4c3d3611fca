"""What a run keeps of its reference beside the prepared data; the best checkpoint by accuracy; a step whose loss is NaN."""

import json
import math

import numpy as np
import pytest

from brigade.train.loss.precomputed import Precomputed
from brigade.train.loss.preferences import Preferences
from brigade.train.step import bad_steps
from testing import preferences
from testing.preferences import NAMED, SECOND, Case
from testing.run_files import losses

DPO = Case("sigmoid")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return preferences.write_inputs(tmp_path_factory.mktemp("preferences"))


@pytest.fixture
def run(folder, raises, counted):
    """run(name, case, *flags): its log, and of how many sequences of each split the reference was asked."""
    train = counted(Precomputed, "_compute", lambda _, self, split, numbers, look: len(numbers))

    def call(name, case=DPO, *flags):
        return train(name, [*case.run(folder)["flags"], *flags])

    return call


def kept(tmp_path):
    """The files of log-probabilities."""
    return sorted((tmp_path / "cache").rglob("*-reference-*.npy"))


def test_a_second_run_reads_what_the_first_has_computed(run, tmp_path):
    first, asked = run("first")
    assert asked == (preferences.TRAINED, preferences.HELD_OUT)
    held = {entry["step"]: entry.get("eval_rewards/accuracies") for entry in first if "eval_loss" in entry}
    assert held.pop(0) is None and None not in held.values(), "at step 0 the model is its own reference"
    second, asked = run("second")
    assert asked == () and losses(second) == losses(first)
    (file,) = kept(tmp_path)
    known = np.load(file)["values"]
    assert known.shape == (2 * 24, 1) and known.dtype == np.float64 and (known < 0).all()


def test_a_computation_that_was_interrupted_goes_on(run, tmp_path, capsys):
    first, _ = run("first")
    (file,) = kept(tmp_path)
    whole = np.load(file)
    known = whole.copy()
    known["values"][4:8] = math.nan  # of two pairs; and a figure of another's is damaged
    known["values"][12] *= 1.01
    np.save(file, known)
    second, asked = run("second")
    assert sum(asked) == 3
    assert "5 samples' log-probabilities are not what was written: computed anew" in capsys.readouterr().err
    assert np.load(file)["values"] == pytest.approx(whole["values"], rel=1e-6) and losses(second) == losses(first)
    file.write_bytes(file.read_bytes()[:-20])
    assert sum(run("third")[1]) == 24 and "is not what was written" in capsys.readouterr().err


@pytest.mark.slow
def test_other_weights_have_a_file_of_their_own(run, folder, tmp_path):
    own, _ = run("own")
    others, asked = run("others", Case("sigmoid", variant=NAMED))
    assert sum(asked) == 24 and len(kept(tmp_path)) == 2 and losses(own) != losses(others)
    _, asked = run("again", Case("sigmoid", variant=NAMED))
    assert asked == ()
    _, asked = run("by its path", DPO, "--reference", str(folder / preferences.MODEL))
    assert asked == () and len(kept(tmp_path)) == 2, "the same weights, whatever they are called"


@pytest.mark.slow
def test_a_file_that_is_gone_is_computed_again_from_the_weights_at_the_start(run, tmp_path):
    whole, _ = run("run", DPO, "--save_steps", "2", "--save_total_limit", "9")
    (file,) = kept(tmp_path)
    before = np.load(file)["values"]
    file.unlink()
    further, asked = run("further", DPO, "--resume_from_checkpoint", str(tmp_path / "run/checkpoint-4"))
    assert sum(asked) == 24
    assert np.load(file)["values"] == pytest.approx(before, rel=1e-6)
    assert losses(further)[4:] == pytest.approx(losses(whole)[4:], rel=1e-5)


@pytest.mark.slow
def test_a_second_model_in_memory_keeps_nothing(run, tmp_path):
    _, asked = run("run", Case("sigmoid", variant=SECOND))
    assert asked == () and not kept(tmp_path)


@pytest.mark.slow
def test_each_kto_answer_has_two_numbers(run, tmp_path):
    run("run", Case("kto"))
    (file,) = kept(tmp_path)
    known = np.load(file)["values"]
    assert known.shape == (24, 2) and np.isfinite(known).all() and (known[:, 0] != known[:, 1]).all()


OWN = """
from torch.nn.functional import logsigmoid
from brigade.train.loss.objective.contract import Result, figures_of

def loss(pairs, options):
    chosen, rejected = (options.beta * ratio for ratio in pairs.log_ratios)
    return Result(-logsigmoid(chosen - rejected), figures_of(pairs, chosen, rejected))
"""


@pytest.mark.slow
def test_an_objective_of_ones_own(run, folder, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    own, asked = run("own", DPO, "--objective", f"{tmp_path / 'own.py'}:loss", "--reference", "model")
    assert sum(asked) == 24
    preferences.assert_equal(preferences.steps_of(own), preferences.plain(folder, DPO))


# ---- the best checkpoint -------------------------------------------------------------------------------------------------
BEST = ["--eval_steps", "1", "--save_steps", "1", "--save_total_limit", "9", "--load_best_model_at_end", "true"]
BY_ACCURACY = ["--metric_for_best_model", "eval_rewards/accuracies"]


def test_the_best_checkpoint_by_accuracy_is_loaded_and_stops_the_run(run, monkeypatch, tmp_path):
    """The accuracy falls after step 2 while the loss falls on, as of a run that learns the wrong thing."""
    sound, accuracies = Preferences.held_out, iter([0.25, 0.5, 0.75, 0.5])

    def held_out(self):
        return sound(self) | {"eval_rewards/accuracies": next(accuracies, 0.75)}

    monkeypatch.setattr(Preferences, "held_out", held_out)
    log, _ = run("run", DPO, *BEST, *BY_ACCURACY, "--early_stopping_patience", "2")
    assert len(losses(log)) == 4  # 0.75 once more is no better
    success = json.loads((tmp_path / "run/success.json").read_text())
    assert success["saved_step"] == 2
    losses_of = {entry["step"]: entry["eval_loss"] for entry in log if "eval_loss" in entry}
    assert success["held_out_loss"] == pytest.approx(losses_of[2], rel=1e-5)


# ---- a step whose loss is NaN --------------------------------------------------------------------------------------------
STEP, MICRO_BATCHES = 3, 3


@pytest.fixture
def poisoned(monkeypatch):
    """The log-probabilities of a step's answers are NaN, once."""
    monkeypatch.setattr(bad_steps, "FEWEST", 3)
    sound, steps = Preferences.loss, []

    def loss(self, token_losses, batch, items):
        bad = self.trainer.state.global_step == STEP - 1 and steps.count(STEP) < MICRO_BATCHES
        steps.append(self.trainer.state.global_step + 1)
        return sound(self, token_losses * math.nan if bad else token_losses, batch, items)

    monkeypatch.setattr(Preferences, "loss", loss)


def test_a_step_whose_loss_is_nan_is_left_out(run, poisoned, tmp_path):
    log, _ = run("run", DPO, "--nonfinite", "skip", "--save_steps", "null")
    assert sorted(entry["step"] for entry in log if "loss" in entry) == [1, 2, 4, 5, 6]
    assert all(map(math.isfinite, losses(log)))
    (named,) = [json.loads(line) for line in (tmp_path / "run/bad_steps.jsonl").read_text().splitlines()]
    assert named["step"] == STEP and named["action"] == "skip"
    figures = [value for entry in log for key, value in entry.items() if key.startswith(("rewards/", "logps/"))]
    assert len(figures) == 5 * 6 and all(map(math.isfinite, figures)), "the step's figures are left out, too"


@pytest.mark.slow
def test_a_run_goes_back_before_a_step_whose_loss_is_nan(run, poisoned, tmp_path):
    log, _ = run("run", DPO, "--nonfinite", "rollback", "--save_steps", "2")
    named = json.loads((tmp_path / "run/bad_steps.jsonl").read_text().splitlines()[0])
    assert named["action"] == "rollback" and named["back_to"].endswith("checkpoint-2")
    assert all(map(math.isfinite, losses(log))) and (tmp_path / "run/success.json").exists()
