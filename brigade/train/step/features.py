"""The features and other callbacks of a run, in the order in which each event reaches them."""

from transformers.trainer_callback import PrinterCallback, TrainerCallback

from ..engines import cast_weights
from ..run.hooks import Feature
from ..upstream.trainer import resume_tensorboard
from ..watch.profile import profiled
from . import nonfinite
from .context import TrainingContext
from .evaluation import EarlyStopping
from .neftune import Neftune
from .progress import Progress
from .report_events import FirstStep, ReportEvents
from .save_interval import SaveInterval
from .schedule_free import ScheduleFree
from .step_callbacks import Figures, OtherRanks, StepsDue
from .streaming import Streaming
from .task_evaluation import TaskEvaluation


def attach(
    trainer: TrainingContext, learns: list[Feature], keeps: list[Feature], offered: list[TrainerCallback]
) -> list[Feature]:
    """Attach a run's callbacks to a trainer that is otherwise complete, and return those that are features.

    learns: what judges its steps, and what the loss and the routers of its model need; keeps: what compares ranks and saves
    offered: callbacks that other parts of the repository ask for
    """
    training, callbacks = trainer.run.settings.recipe.training, list[TrainerCallback]()
    trainer.remove_callback(PrinterCallback)
    every: list[TrainerCallback] = trainer.callback_handler.callbacks
    if "tensorboard" in trainer.args.report_to:
        resume_tensorboard(every)
    progress, report = (Progress(), ReportEvents(trainer.run)) if trainer.run.world.is_main_rank else (None, None)
    callbacks += [each for each in (progress, report, FirstStep(progress, report)) if each]
    if trainer.data.train.streamed:
        callbacks.append(Streaming(trainer))
    if cast_weights.applies(trainer):
        callbacks.append(cast_weights.CastWeights())
    callbacks += profiled(trainer.run)
    # OtherRanks comes first: what learns may count with the random numbers of the step.
    callbacks += [StepsDue(), nonfinite.StepGuard(), OtherRanks(trainer), *learns]
    if training.neftune_noise_alpha:
        callbacks.append(Neftune(trainer, training.neftune_noise_alpha))
    if training.early_stopping_patience:
        callbacks.append(EarlyStopping(training.early_stopping_patience, training.metric_for_best_model))
    if training.save_steps == "auto":
        callbacks.append(SaveInterval(trainer.run, lambda: trainer.checkpoints.blocked))
    # The replica comes after all that may wish for something.
    callbacks += [trainer.stopping, trainer.replica, *offered]
    for callback in callbacks:
        trainer.add_callback(callback)
    # Trackers and a user's callbacks see all figures, and at the end the model that is kept.
    average = [ScheduleFree(trainer)] if training.optim == "schedule_free_adamw" else []
    every[1:1] = [
        Figures(trainer),
        *keeps,
        *average,
        *([TaskEvaluation(trainer)] if training.eval_tasks else []),
    ]
    return [callback for callback in every if isinstance(callback, Feature)]
