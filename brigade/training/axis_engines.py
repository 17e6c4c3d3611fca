"""Which engine runs a strategy that divides more than the data. Each is imported by the runs that use it alone."""

from ..run.directory import Run
from .engines import OneProcess


def of(run: Run) -> OneProcess:
    """The engine of a run's axes."""
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
    from . import tensor_engines

    return tensor_engines.ENGINES[kind](run)
