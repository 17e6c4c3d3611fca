"""Checkpoints of a running Trainer: when one is whole, what lies in it, and which is the best."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import ExportableState

from ..checkpoint import carried
from ..checkpoint.saving import Saving
from ..distributed import heartbeat, ranks
from ..recipe.objectives import to_minimise
from ..run.directory import STATE
from ..upstream import checkpoint_files
from ..upstream.trainer_state import StateFile
from . import bad_steps, resharding
from .hooks import Feature

if TYPE_CHECKING:
    from .trainer import Trainer


class Checkpoints(Feature):
    """Writes checkpoints, knows which has the lowest held-out loss, and loads that one at the end if the recipe asks for it.

    saving: from the first checkpoint on
    """

    def __init__(self, trainer: "Trainer", most_on_host: int) -> None:
        """most_on_host: bytes of a checkpoint that a host may have to write"""
        self.trainer, self._most_on_host = trainer, most_on_host
        self.saving: Saving | None = None
        self._state_file = StateFile()

    @property
    def blocked(self) -> float:
        """Seconds for which the last checkpoint held this rank up; 0 before the first."""
        return self.saving.blocked if self.saving else 0.0

    def begin(self, checkpoint: Path | None) -> None:
        settings, state = self.trainer.run.settings, self.trainer.state
        if settings.remote and not settings.resume_from_checkpoint and (best := state.best_model_checkpoint):
            # The host that wrote this may have had its outputs elsewhere.
            state.best_model_checkpoint = str(Path(self.trainer.args.output_dir) / Path(best).name)

    def before_step(self) -> None:
        if self.saving:
            self.saving.check()

    def wait(self) -> None:
        """Wait until the last checkpoint is whole. Raises UserError where it got no name."""
        if self.saving:
            with heartbeat.within(heartbeat.CHECKPOINT):
                self.saving.wait()

    def let_finish(self) -> None:
        """Give a checkpoint that is being written its time, before the run ends with an error."""
        if self.saving:
            self.saving.let_finish()

    # ---- writing one -------------------------------------------------------------------------------------------------
    def save(self) -> None:
        """Write one of this step. A collective.

        Raises UserError where a trained weight is not finite, or the checkpoint before could not be written."""
        trainer = self.trainer
        bad_steps.check_weights(trainer)
        if self.saving is None:
            further = sum(each.bytes for each in trainer.base_files.carried.values()) if self._has_model else 0
            self.saving = Saving(trainer.run, self._most_on_host + further)
        best = trainer.state.best_model_checkpoint
        place = self._place_in_run()
        self.saving.save(trainer.state.global_step, self._write, place, Path(best) if best else None)

    def _write(self, folder: Path) -> None:
        """Write this rank's files."""
        trainer = self.trainer
        trainer.store_flos()
        trainer.engine.save_weights(trainer, folder)
        if self._has_model:
            carried.add_to_checkpoint(folder, trainer.base_files.carried, trainer.base_files.predicts)
        trainer.engine.save_optimizer(trainer, folder)
        trainer.engine.save_states(folder)
        for feature in trainer.features:
            feature.write(folder)
        checkpoint_files.save_scaler_and_random_numbers(trainer, folder)
        if trainer.args.should_save:
            for each in (*trainer.callback_handler.callbacks, trainer.control):
                if isinstance(each, ExportableState):
                    name, kept = type(each).__name__, trainer.state.stateful_callbacks
                    kept[name] = [*kept[name], each.state()] if isinstance(kept.get(name), list) else each.state()
            self._state_file.write(trainer.state, folder / STATE)

    @property
    def _has_model(self) -> bool:
        """Whether checkpoints are of a whole model, and this rank writes what each has once."""
        return self.trainer.args.should_save and not self.trainer.run.settings.recipe.model.use_peft

    def _place_in_run(self) -> dict[str, Any]:
        """Return what the manifest says of the checkpoint's place in the run."""
        trainer = self.trainer
        world, samples = trainer.world, trainer.replica.samples
        tokens = trainer.meter.tokens_ever + trainer.replica.of_others
        place = {
            "step": trainer.state.global_step,
            "samples": samples,
            "tokens": trainer.tokens_before + sum(ranks.gather(tokens)),
            "position": {"epoch": trainer.state.epoch, "sample": samples},
            "world": {"ranks": world.size, "hosts": list(dict.fromkeys(ranks.gather(world.host)))},
        }
        for feature in trainer.features:
            place |= feature.place_in_run()
        return place

    # ---- the best one ------------------------------------------------------------------------------------------------
    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Note the best figure so far. Only evaluations whose model is about to be saved can belong to the best checkpoint.

        All ranks decide by the figure which one it is; Transformers looks for a directory, which other hosts may not see.
        """
        metric = self.trainer.run.settings.recipe.training.metric_for_best_model
        lowest = float("inf") if state.best_metric is None else to_minimise(metric, {metric: state.best_metric})
        if state.global_step and control.should_save and to_minimise(metric, metrics) < lowest:
            state.best_metric, state.best_global_step = metrics[metric], state.global_step
            state.best_model_checkpoint = str(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.wait()  # the best checkpoint may be the last
        wanted = self.trainer.run.settings.recipe.training.load_best_model_at_end
        if not wanted or not state.best_model_checkpoint or self.trainer.stopping.by:  # a stopped run goes on later
            return
        best = Path(state.best_model_checkpoint)
        with heartbeat.within(heartbeat.LOADING):
            if self.trainer.loads_by_itself(best):
                checkpoint_files.load_best_weights(self.trainer)
                self.trainer.complete_weights(best)
            else:
                resharding.reshard(self.trainer, best, moments=False)
