"""The steps of a run that need torch, by their names in train.py, which imports them once it knows that there is something to
train: a user's mistake and a finished run are told without those seconds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UserError
from .. import upstream
from ..checkpoint.resume import agree as agree_on_checkpoint
from ..checkpoint.resume import how_to_continue
from ..data.places import name_row
from ..data.prepare import Prepared
from ..data.prepare import prepare as prepare_data
from ..distributed.consistency import of_model as digest_model
from ..distributed.devices import check as check_gpus_are_seen
from ..distributed.process import this_process
from ..engines.kernels import choose_kernels, compile_layers, prove_kernels
from ..local.replicas import divide as divide_into_replicas
from ..model.adapter_weights import find as find_adapters
from ..model.images.features import load_checked as load_processor
from ..model.images.saved import difference as difference_of_images
from ..model.load import weights as find_weights
from ..model.location import load_config
from ..model.tokenizer import load_tokenizer
from ..run.directory import Run
from ..watch.out_of_memory import explain as explain_out_of_memory
from ..watch.watch_thread import watched
from .environment import prepare_environment
from .lengthening import how_lengthened
from .memory import settle_memory
from .micro_batch import settle_batch
from .preflight import check_callbacks, check_gpus_differ, check_host, check_run, check_steps
from .summary import summary as print_summary
from .task_loading import prepare as prepare_tasks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, TrainerCallback

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
    timeline = this_process.timeline
    timeline.enter("imports")
    with upstream.quick_imports(this_process.own):  # seconds, all the same
        from ..engines import choose_engine
        from ..loss import own_loss
        from . import arguments

        if run.strategy.axes.stages > 1:
            from .pipeline_trainer import PipelineTrainer as Trainer
        else:
            from .trainer import Trainer
        upstream.unwrap_without_importing_deepspeed()
    timeline.enter("model")
    engine = choose_engine.engine_of(run)
    args = arguments.training_arguments(run, engine, len(data.train), resuming=checkpoint is not None)
    model = engine.load_model(weights)
    if run.kernels.use_liger_kernel:
        engine.fuse(model)
    own_loss.apply(model, run.settings)
    if run.settings.recipe.model.use_peft:
        model = engine.with_adapters(model, weights)
    if run.settings.recipe.training.torch_compile:
        compile_layers(model)
    timeline.enter("trainer")
    trainer = Trainer(run, engine, model, args, data, tokenizer, callbacks)
    trainer.weights = weights
    return trainer


def explain(
    run: Run, config: PreTrainedConfig, data: Prepared, resumed: bool, error: BaseException
) -> UserError | None:
    """Return an error of a run in a user's terms, where there are better ones; else None. The arguments are those of train.py."""
    return name_row(error, data, run.settings) or explain_out_of_memory(run, config, resumed, error)


def compare_images(run: Run, data: Prepared, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn, on one rank, where the processor that was saved with the model makes something else of an image than the run did."""
    if data.images is None or not run.world.is_main_rank or not (run.directory / "tokenizer_config.json").is_file():
        return
    said = difference_of_images(run.directory, data.folder, data.images, tokenizer)
    if said:
        print(f"warning: {said}.", file=sys.stderr)
