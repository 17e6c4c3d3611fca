"""Which engine runs a strategy: one of engines.py, or one of the files imported below where it has axes besides data."""

from ..run.directory import Run
from .engines import ENGINES, OneProcess


def of(run: Run) -> OneProcess:
    """The engine of a run's strategy; strategy/refused.yaml has left those alone that there is one for."""
    if run.strategy.axes.experts > 1:
        from .expert_engines import ExpertParallel

        return ExpertParallel(run)
    if run.strategy.axes:
        raise NotImplementedError(str(run.strategy.axes))
    return ENGINES[run.strategy.kind](run)
