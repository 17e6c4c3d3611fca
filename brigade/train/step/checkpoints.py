"""Checkpoints of a running Trainer: when one is whole, what lies in it, and which is the best."""

from __future__ import annotations

import json
import re
from pathlib import Path

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ...errors import UserError, shown
from ..checkpoint import carried
from ..checkpoint.saving import Saving
from ..distributed import heartbeat, ranks
from ..distributed.process import this_process
from ..engines import resharding
from ..recipe.objectives import to_minimise
from ..run import on_disk
from ..run.hooks import Feature
from ..upstream import checkpoint_files
from ..upstream.checkpoint_files import StateFile
from .context import TrainingContext


class Checkpoints(Feature):
    """Writes checkpoints, knows which has the lowest held-out loss, and loads that one at the end if the recipe asks for it.

    saving: from the first checkpoint on
    """

    def __init__(self, trainer: TrainingContext, most_on_host: int) -> None:
        """most_on_host: bytes of a checkpoint that a host may have to write"""
        self.trainer, self._most_on_host = trainer, most_on_host
        self.saving: Saving | None = None
        self._state_file = StateFile()

    @property
    def blocked(self) -> float:
        """Seconds for which the last checkpoint held this rank up; 0 before the first."""
        return self.saving.blocked if self.saving else 0.0

    def begin(self, checkpoint: Path | None) -> None:
        """Look for the best checkpoint so far among the run's own: a state's path may belong to another run or another host."""
        if checkpoint is None:
            return
        # Transformers has forgotten a path that is no directory here, but not its figure (Trainer._init_training_state).
        recorded = json.loads((checkpoint / on_disk.STATE).read_text())["best_model_checkpoint"]
        if not recorded:
            return
        state, named = self.trainer.state, Path(recorded)
        is_remote = self.trainer.run.settings.remote and not self.trainer.run.settings.resume_from_checkpoint
        folders = [Path(self.trainer.args.output_dir), checkpoint.parent][: 1 if is_remote else 2]
        beside = [folder / named.name for folder in folders if re.fullmatch(r"checkpoint-\d+", named.name)]
        # others may not see rank 0's directory
        there = ranks.gather([path.is_dir() or bool(is_remote) for path in beside])[0]
        found = next((path for path, is_there in zip(beside, there, strict=True) if is_there), None)
        if found is None:
            if self.trainer.run.world.is_main_rank:
                problem = f"the best checkpoint that {checkpoint} names is not beside it: {shown(str(named))}"
                print(f"warning: {problem}. From here on the best is looked for anew.", flush=True)
            state.best_metric = state.best_model_checkpoint = state.best_global_step = None
        else:
            state.best_model_checkpoint = str(found)
            state.best_global_step = state.best_global_step or on_disk.named_step(found.name)

    def before_step(self) -> None:
        if self.saving:
            self.saving.check()

    def wait(self) -> None:
        """Wait until the last checkpoint is whole. Raises UserError where it got no name."""
        if self.saving:
            with this_process.heartbeat.within(heartbeat.CHECKPOINT):
                self.saving.wait()

    def let_finish(self) -> None:
        """Give a checkpoint that is being written its time, before the run ends with an error."""
        if self.saving:
            self.saving.let_finish()

    # ---- writing one -------------------------------------------------------------------------------------------------
    def save(self) -> None:
        """Write a checkpoint of this step. A collective. Raises UserError where the previous one could not be written."""
        trainer = self.trainer
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
            self._state_file.write(trainer.state, folder / on_disk.STATE)

    @property
    def _has_model(self) -> bool:
        """Whether checkpoints hold a whole model, and this rank writes what a checkpoint has only once."""
        return self.trainer.args.should_save and not self.trainer.run.settings.recipe.model.use_peft

    def _place_in_run(self) -> dict[str, object]:
        """Return what the manifest says of the checkpoint's place in the run."""
        trainer = self.trainer
        world, samples = trainer.run.world, trainer.replica.samples
        tokens = trainer.meter.tokens_ever + trainer.replica.of_others
        place = {
            "step": trainer.state.global_step,
            "samples": samples,
            "tokens": trainer.meter.tokens_before + sum(ranks.gather(tokens)),
            "position": {"epoch": trainer.state.epoch, "sample": samples},
            "world": {"ranks": world.size, "hosts": list(dict.fromkeys(ranks.gather(world.host)))},
        }
        for feature in trainer.features:
            place |= feature.place_in_run()
        return place

    # ---- the best one ------------------------------------------------------------------------------------------------
    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **_: object,
    ) -> None:
        """Note the best figure so far. Only evaluations whose model is about to be saved can belong to the best checkpoint.

        All ranks decide by the figure which one it is; Transformers looks for a directory, which other hosts may not see.
        """
        metric = self.trainer.run.settings.recipe.training.metric_for_best_model
        lowest = float("inf") if state.best_metric is None else to_minimise(metric, {metric: state.best_metric})
        if state.global_step and control.should_save and to_minimise(metric, metrics) < lowest:
            state.best_metric, state.best_global_step = metrics[metric], state.global_step
            state.best_model_checkpoint = str(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        self.wait()  # the best checkpoint may be the last
        wanted = self.trainer.run.settings.recipe.training.load_best_model_at_end
        if not wanted or not state.best_model_checkpoint or self.trainer.stopping.by:  # a stopped run goes on later
            return
        best = Path(state.best_model_checkpoint)
        step = on_disk.step_of(best)
        if step != state.best_global_step:
            problem = f"the best checkpoint was of step {state.best_global_step}, and {best.name} holds step {step}"
            raise UserError(str(best), problem, "bring it back from a copy, or set load_best_model_at_end: false")
        with this_process.heartbeat.within(heartbeat.LOADING):
            if self.trainer.loads_by_itself(best):
                checkpoint_files.load_best_weights(self.trainer)
                self.trainer.complete_weights(best)
            else:
                resharding.reshard(self.trainer, best, moments=False)
