"""Loading a checkpoint into a run that goes on, as Transformers does for one that resumes (trainer.py: _prepare_for_training)."""

from typing import Any


def load_states(trainer: Any, checkpoint: str) -> None:
    """Weights, optimizer states and fp16's scale of a checkpoint, into the model and optimizer of a running Trainer."""
    if trainer.is_deepspeed_enabled:
        from transformers.integrations.deepspeed import deepspeed_load_checkpoint

        steps = trainer.deepspeed.global_steps  # by which it names what it saves
        peft = trainer.run.settings.recipe.model.use_peft
        deepspeed_load_checkpoint(trainer.model_wrapped, checkpoint, load_module_strict=not peft)
        trainer.deepspeed.global_steps = steps
    else:
        trainer._load_from_checkpoint(checkpoint, trainer.model)
    trainer._load_optimizer_and_scheduler(checkpoint)
    trainer._load_scaler(checkpoint)
