"""Whether a model and a batch fit a pipeline, before the model is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....errors import UserError
from ....errors.console import counted
from ....errors.tables import Document
from ... import upstream
from ...recipe.batch import Batch
from ...run.directory import Run
from ...strategy.deepspeed_config import owned_values
from . import pipeline_schedule as schedules
from . import pipeline_split as splitting

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


CURE = "use another strategy for this model: ds_configs/README.md"


def check(run: Run, config: PreTrainedConfig, batch: Batch) -> None:
    """Raise UserError where a model has too few layers, where its stages do not compute what it computes, and where a schedule
    cannot take this number of micro-batches."""
    axes, name = run.strategy.axes, type(config).__name__
    key = next(_not_read(run.strategy.ds_config or {}), None)
    if key:
        problem = "a pipeline trains without DeepSpeed's engine, and this key means nothing to it"
        raise UserError(f"{run.strategy.source}: {key}", problem, "remove the line, or the pipeline")
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
    why = schedules.refusal(axes, batch.accumulation)
    if why:
        size = batch.micro * batch.data_parallel_size
        cure = f"set global_batch_size to a multiple of {size * axes.stages}, or name another schedule"
        raise UserError(run.strategy.place("stages"), why, cure)


# Keys of a ds_config that a pipeline reads, and those that change only how DeepSpeed sends and counts.
READ = {
    "pipeline",
    "tensor_parallel",
    "expert_parallel",
    "sequence_parallel_size",
    "zero_optimization",
    "communication_data_type",
    "steps_per_print",
    "wall_clock_breakdown",
}
READ_OF_ZERO = {"stage", "reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients",
                "reduce_scatter", "allgather_partitions", "round_robin_gradients"}  # fmt: skip


def _not_read(ds_config: Document) -> Iterator[str]:
    """Yield the keys of a ds_config that a pipeline does not read, although they would change what DeepSpeed does."""
    owned = {path.partition(".")[0] for path in owned_values()}
    yield from (key for key in ds_config if key not in READ | owned)
    yield from (f"zero_optimization.{key}" for key in ds_config.get("zero_optimization", {}) if key not in READ_OF_ZERO)
