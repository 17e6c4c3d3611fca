"""The files of a rank's part of a checkpoint, as Transformers writes and reads them (transformers/trainer.py).

Each is a collective.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import replaced

if TYPE_CHECKING:
    import torch
    from transformers import Trainer, TrainerState


def save_weights(trainer: Trainer, folder: Path) -> None:
    """Write the weights as the engine has them (save_model with _internal_call)."""
    trainer.save_model(str(folder), _internal_call=True)


def save_model(trainer: Trainer, model: torch.nn.Module, folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Write a gathered state dict of the trainer's model in Hugging Face format, with the tokenizer (_save).

    model: what its save_pretrained() is asked of
    """
    with replaced(trainer, model=model):
        trainer._save(str(folder), state_dict=state)


def name_once(state: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Leave one name of tied weights in a gathered state dict: they may be two tensors now, and save_pretrained() looks for one
    (modeling_utils.py: remove_tied_weights_from_state_dict)."""
    for second_name in model.all_tied_weights_keys:
        state.pop(second_name, None)


def save_optimizer(trainer: Trainer, folder: Path) -> None:
    """Write the optimizer's states and the schedule (_save_optimizer_and_scheduler)."""
    trainer._save_optimizer_and_scheduler(str(folder))


def save_scaler_and_random_numbers(trainer: Trainer, folder: Path) -> None:
    """Write fp16's loss scale and this rank's random numbers (_save_scaler and _save_rng_state)."""
    trainer._save_scaler(str(folder))
    trainer._save_rng_state(str(folder))


def load_states(trainer: Trainer, checkpoint: Path) -> None:
    """Load weights, optimizer states and fp16's scale into the model and optimizer of a running Trainer, as it does when it
    resumes (_prepare_for_training)."""
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


def load_best_weights(trainer: Trainer) -> None:
    """Load the weights of state.best_model_checkpoint (_load_best_model)."""
    trainer._load_best_model()


# ---- trainer_state.json ---------------------------------------------------------------------------------------------
# trainer_state.json as Transformers writes and reads it, without making the whole log into text for each checkpoint.
# an object's own key has this indentation only at the top, and no text has a line break
_EMPTY = '\n  "log_history": []'


class StateFile:
    """Writes the states of one run, with bytes equal to TrainerState.save_to_json's (transformers/trainer_callback.py).

    That one copies the log and makes all of it into text each time, in Python because of the indentation: 1.9 s after 20,000
    lines. Here each line is made into text once. Each time all are compared with what is written, by their repr, which tells 1
    from 1.0 and True, and sees into a list (0.07 s then): a line that was changed since, or another log after a hand-over, is
    made into text again.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []  # the repr of each
        self._texts: list[str] = []

    def write(self, state: TrainerState, path: Path) -> None:
        """Write a TrainerState. Raises TypeError for what JSON cannot hold, and OSError."""
        log = state.log_history
        same = self._same(log)
        del self._lines[same:], self._texts[same:]
        for line in log[same:]:
            self._texts.append(json.dumps(line, indent=2, sort_keys=True).replace("\n", "\n    "))
            self._lines.append(repr(line))
        rest = dataclasses.asdict(dataclasses.replace(state, log_history=[]))
        before, empty, after = json.dumps(rest, indent=2, sort_keys=True).partition(_EMPTY)
        with path.open("w", encoding="utf-8") as file:
            file.write(before)
            file.write(f"{empty[:-1]}\n    " + ",\n    ".join(self._texts) + "\n  ]" if log else empty)
            file.write(f"{after}\n")

    def _same(self, log: list[dict[str, Any]]) -> int:
        """Return how many lines, from the first on, are those that are already texts."""
        lines = enumerate(zip(log, self._lines, strict=False))
        changed = (number for number, (line, known) in lines if repr(line) != known)
        return next(changed, min(len(log), len(self._lines)))
