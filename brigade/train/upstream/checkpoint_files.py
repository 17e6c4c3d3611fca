"""The files of a rank's part of a checkpoint, as Transformers writes them (transformers/trainer.py: _save_checkpoint)."""

from pathlib import Path
from typing import Any


def write(trainer: Any, folder: Path) -> None:
    """Model, optimizer, schedule, loss scale and random numbers. A collective."""
    trainer.store_flos()
    trainer.save_model(str(folder), _internal_call=True)
    trainer._save_optimizer_and_scheduler(str(folder))
    trainer._save_scaler(str(folder))
    trainer._save_rng_state(str(folder))
