"""The files of a rank's part of a checkpoint, as Transformers writes and reads them (transformers/trainer.py).

Each is a collective.
"""

from pathlib import Path
from typing import Any


def save_weights(trainer: Any, folder: Path) -> None:
    """Write the weights as the engine has them (line 4077: save_model, _internal_call)."""
    trainer.save_model(str(folder), _internal_call=True)


def save_model(trainer: Any, model: Any, folder: Path, state: dict[str, Any]) -> None:
    """Write a gathered state dict of the trainer's model in Hugging Face format, with the tokenizer (line 4131: _save).

    model: what its save_pretrained() is asked of
    """
    own, trainer.model = trainer.model, model
    try:
        trainer._save(str(folder), state_dict=state)
    finally:
        trainer.model = own


def name_once(state: dict[str, Any], model: Any) -> None:
    """Leave one name of tied weights in a gathered state dict: they may be two tensors now, and save_pretrained() looks for one
    (modeling_utils.py: remove_tied_weights_from_state_dict)."""
    for second_name in model.all_tied_weights_keys:
        state.pop(second_name, None)


def save_optimizer(trainer: Any, folder: Path) -> None:
    """Write the optimizer's states and the schedule (line 3513)."""
    trainer._save_optimizer_and_scheduler(str(folder))


def save_scaler_and_random_numbers(trainer: Any, folder: Path) -> None:
    """Write fp16's loss scale and this rank's random numbers (lines 3579 and 3462)."""
    trainer._save_scaler(str(folder))
    trainer._save_rng_state(str(folder))


def load_states(trainer: Any, checkpoint: Path) -> None:
    """Load weights, optimizer states and fp16's scale into the model and optimizer of a running Trainer, as it does when it
    resumes (line 1715: _prepare_for_training)."""
    folder = str(checkpoint)
    if trainer.is_deepspeed_enabled:
        from transformers.integrations.deepspeed import deepspeed_load_checkpoint

        steps = trainer.deepspeed.global_steps  # by which it names what it saves
        peft = trainer.run.settings.recipe.model.use_peft
        deepspeed_load_checkpoint(trainer.model_wrapped, folder, load_module_strict=not peft)
        trainer.deepspeed.global_steps = steps
    else:
        trainer._load_from_checkpoint(folder, trainer.model)
    trainer._load_optimizer_and_scheduler(folder)
    trainer._load_scaler(folder)


def load_best_weights(trainer: Any) -> None:
    """Load the weights of state.best_model_checkpoint (line 3735)."""
    trainer._load_best_model()
