"""Which engine and which Trainer run a strategy."""

from typing import Any

from ..run.directory import Run
from . import axis_engines
from .engines import ENGINES, OneProcess


def of(run: Run) -> OneProcess:
    """The engine of a run's strategy; strategy/refused.yaml has left those alone that there is one for."""
    if run.strategy.axes:
        return axis_engines.of(run)
    return ENGINES[run.strategy.kind](run)


def trainer_of(run: Run) -> Any:
    """The class of its Trainer."""
    if run.strategy.axes.stages > 1:
        from .pipeline_trainer import PipelineTrainer

        return PipelineTrainer
    from .trainer import Trainer

    return Trainer
