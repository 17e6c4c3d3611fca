"""Whether a model and a batch fit a pipeline. Told before the model is built."""

from typing import Any

from .. import upstream
from ..errors import UserError
from ..errors.console import counted
from ..recipe.batch import Batch
from ..run.directory import Run
from . import pipeline_schedule as schedules
from . import pipeline_split as splitting

CURE = "use another strategy for this model: ds_configs/README.md"


def check(run: Run, config: Any, batch: Batch) -> None:
    """Raises UserError where a model has too few layers, where stages of it do not compute what it does, and where a schedule
    cannot do this number of micro-batches."""
    axes, name = run.strategy.axes, type(config).__name__
    stages, layers = axes.every_stage, getattr(config.get_text_config(), "num_hidden_layers", None) or 0
    if stages > layers:
        each = (
            f"{counted(axes.stages, 'rank')} x {counted(axes.virtual, 'stage')} on each = " if axes.virtual > 1 else ""
        )
        problem = f"{each}{stages} stages, but {name} has {counted(layers, 'layer')}"
        raise UserError(run.strategy.place("stages"), problem, f"set it to {layers} or less" if layers else CURE)
    trusted = run.settings.recipe.model.trust_remote_code
    why = splitting.tried(config, trusted) if upstream.model_class(config) else "its code is not a part of Transformers"
    if why:
        raise UserError(run.strategy.place("stages"), f"{name} cannot be divided into stages: {why}", CURE)
    if why := schedules.refusal(axes, batch.accumulation):
        size = batch.micro * batch.data_parallel_size
        cure = f"set global_batch_size to a multiple of {size * axes.stages}, or name another schedule"
        raise UserError(run.strategy.place("stages"), why, cure)
