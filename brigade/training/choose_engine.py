"""Which engine runs a strategy: one of engines.py, or one of the files imported below where it has axes besides data."""

from ..run.directory import Run
from .engines import ENGINES, OneProcess


def of(run: Run) -> OneProcess:
    """The engine of a run's strategy; strategy/refused.yaml has left those alone that there is one for."""
    axes = run.strategy.axes
    if list(axes.used) == ["tensor"]:
        from . import tensor_engines

        return tensor_engines.ENGINES[run.strategy.kind](run)
    if axes:
        raise NotImplementedError(str(axes))
    return ENGINES[run.strategy.kind](run)
