"""Callbacks that a caller of train.main() hands in."""

from types import SimpleNamespace

import pytest
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from brigade.train.loop import preflight
from brigade.train.upstream.trainer import ResumedTensorBoard


def test_transformers_own_early_stopping_is_refused(mistake):
    said = mistake(preflight.check_callbacks, (EarlyStoppingCallback(),))
    assert "EarlyStoppingCallback" in said and "early_stopping_patience" in said


@pytest.mark.parametrize("step, first", [(0, 0), (4, 5)])
def test_tensorboard_hides_the_steps_that_are_trained_again(step, first, tmp_path):
    callback, begun = ResumedTensorBoard(), []
    callback._SummaryWriter = lambda **how: begun.append(how) or SimpleNamespace(add_text=lambda *_: None)
    state = TrainerState(global_step=step, is_world_process_zero=True)
    callback.on_train_begin(TrainingArguments(str(tmp_path), report_to=[]), state, TrainerControl())
    assert [how["purge_step"] for how in begun] == [first]
