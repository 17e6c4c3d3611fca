"""The Trainer of a run, with its engine and its model on this rank."""

from pathlib import Path
from typing import Any

from .. import upstream
from ..data.prepare import Prepared
from ..model.compiled import compile_layers
from ..run.directory import Run


def build_trainer(
    run: Run, data: Prepared, tokenizer: Any, weights: str, checkpoint: Path | None, callbacks: tuple[Any, ...]
) -> Any:
    """The run's Trainer, whose model has these weights: a directory, or what else model/load.py has found.

    checkpoint: from which it goes on; callbacks: further TrainerCallbacks
    """
    with upstream.quick_imports(run.settings.recipe.needs_bitsandbytes):  # seconds, all the same
        from . import arguments, choose_engine

        trainer_class = choose_engine.trainer_class_of(run)
    engine = choose_engine.engine_of(run)
    args = arguments.training_arguments(run, engine, len(data.train), resuming=checkpoint is not None)
    model = engine.load_model(weights)
    if run.settings.recipe.model.use_peft:
        model = engine.with_adapters(model, weights)
    if run.settings.recipe.training.torch_compile:
        compile_layers(model)
    trainer = trainer_class(run, engine, model, args, data, tokenizer, callbacks)
    trainer.weights = weights
    return trainer
