"""Callbacks that a caller of train.main() hands in."""

from types import SimpleNamespace

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from brigade.train.step import preflight
from brigade.train.upstream.trainer import ResumedTensorBoard, resume_tensorboard


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


def test_a_tensorboard_callback_that_a_user_hands_in_stays(tmp_path):
    """Transformers puts its own before a user's, and only its own is replaced."""
    users = [TensorBoardCallback(), TensorBoardCallback()]
    arguments = TrainingArguments(str(tmp_path), report_to=["tensorboard"], use_cpu=True)
    every = Trainer(torch.nn.Linear(1, 1), arguments, callbacks=list(users)).callback_handler.callbacks
    resume_tensorboard(every)
    found = [callback for callback in every if isinstance(callback, TensorBoardCallback)]
    assert type(found[0]) is ResumedTensorBoard and found[1:] == users
