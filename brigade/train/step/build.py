"""The Trainer of a run, with its engine and its model on this rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .. import upstream
from ..data.prepare import Prepared
from ..engines.kernels import compile_layers
from ..run.directory import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainerCallback

    from .trainer import Trainer


def build_trainer(
    run: Run,
    data: Prepared,
    tokenizer: PreTrainedTokenizerBase,
    weights: str,
    checkpoint: Path | None,
    callbacks: tuple[TrainerCallback, ...],
) -> Trainer:
    """The run's Trainer, whose model has these weights: a directory, or what else model/load.py has found.

    checkpoint: from which it goes on; callbacks: further TrainerCallbacks
    """
    with upstream.quick_imports():  # seconds, all the same
        from ..engines import choose_engine
        from ..loss import own_loss
        from . import arguments

        if run.strategy.axes.stages > 1:
            from .pipeline_trainer import PipelineTrainer as Trainer
        else:
            from .trainer import Trainer
    engine = choose_engine.engine_of(run)
    args = arguments.training_arguments(run, engine, len(data.train), resuming=checkpoint is not None)
    model = engine.load_model(weights)
    own_loss.apply(model, run.settings)
    if run.settings.recipe.model.use_peft:
        model = engine.with_adapters(model, weights)
    if run.settings.recipe.training.torch_compile:
        compile_layers(model)
    trainer = Trainer(run, engine, model, args, data, tokenizer, callbacks)
    trainer.weights = weights
    return trainer
