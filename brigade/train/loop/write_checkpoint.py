"""A checkpoint of a running Trainer: sound weights, its files, and what its manifest says of its place in the run."""

from functools import partial
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState

from ..checkpoint.saving import Saving
from ..distributed import ranks
from ..run.directory import STATE
from ..upstream import checkpoint_files
from . import bad_steps, nonfinite


def save(trainer: Any, own: Any = None) -> None:
    """A collective. own: LocalSteps.local_weights()

    Raises UserError where a trained weight is not finite, or an earlier checkpoint could not be written."""
    bad_steps.check_weights(trainer, nonfinite.guard_of(trainer))
    if trainer.saving is None:
        trainer.saving = Saving(trainer.run)
    best = trainer.state.best_model_checkpoint
    step, keep = trainer.state.global_step, Path(best) if best else None
    trainer.saving.save(step, partial(_write, trainer, own), _place_in_run(trainer), keep)


def _write(trainer: Any, own: Any, folder: Path) -> None:
    """This rank's files."""
    checkpoint_files.write(trainer, folder)
    if trainer.local_steps:
        trainer.local_steps.save(folder, own)
    if trainer.args.should_save:
        for one in (*trainer.callback_handler.callbacks, trainer.control):
            if isinstance(one, ExportableState):
                name, kept = type(one).__name__, trainer.state.stateful_callbacks
                kept[name] = [*kept[name], one.state()] if isinstance(kept.get(name), list) else one.state()
        trainer.state.save_to_json(str(folder / STATE))


def _place_in_run(trainer: Any) -> dict[str, Any]:
    """What a checkpoint's manifest says of its place in the run."""
    step, world, local = trainer.state.global_step, trainer.world, trainer.local_steps
    samples = local.samples if local else step * trainer.run.batch.global_size
    tokens = trainer.meter.tokens_ever + (local.of_others if local else 0)
    return {
        "step": step,
        "samples": samples,
        "tokens": trainer.tokens_before + sum(ranks.gather(tokens)),
        "position": {"epoch": trainer.state.epoch, "sample": samples},
        "world": {"ranks": world.size, "hosts": list(dict.fromkeys(ranks.gather(world.host)))},
        **(local.place() if local else {}),
    }
