"""Which engine runs a strategy: one of engines.py, or one of the files imported below where it has axes besides data."""

from typing import Any

from ..run.directory import Run
from .engines import ENGINES, OneProcess


def of(run: Run) -> OneProcess:
    """The engine of a run's strategy; strategy/refused.yaml has left those alone that there is one for."""
    axes, kind = run.strategy.axes, run.strategy.kind
    if axes.stages > 1:
        from .pipeline_engine import PipelineEngine

        return PipelineEngine(run)
    if axes.experts > 1:
        from .expert_engines import ExpertParallel

        return ExpertParallel(run)
    if axes.sequence > 1:
        from . import sequence_engines

        return sequence_engines.ENGINES[kind](run)
    if axes.tensor > 1:
        from . import tensor_engines

        return tensor_engines.ENGINES[kind](run)
    return ENGINES[kind](run)


def trainer_of(run: Run) -> Any:
    """The class of its Trainer."""
    if run.strategy.axes.stages > 1:
        from .pipeline_trainer import PipelineTrainer

        return PipelineTrainer
    from .trainer import Trainer

    return Trainer
