"""Which engine runs a strategy that divides more than the data. Each is imported by the runs that use it alone."""

from ..run.directory import Run
from . import engines, sequence_engines
from .pipeline_engine import PipelineEngine


def of(run: Run) -> engines.OneProcess:
    """The engine of a run's axes."""
    engine = _of_parameters(run)
    if run.strategy.axes.sequence > 1:
        engine = sequence_engines.with_divided_rows(engine)
    return engine(run)


def _of_parameters(run: Run) -> type[engines.OneProcess]:
    """By what divides the model; rows may be divided beside it."""
    axes, kind = run.strategy.axes, run.strategy.kind
    if axes.stages > 1:
        return PipelineEngine
    if axes.experts > 1:
        from . import expert_engines

        return expert_engines.ENGINES[kind]
    if axes.tensor > 1:
        from . import tensor_engines

        return tensor_engines.ENGINES[kind]
    return engines.ENGINES[kind]
