"""What engines, losses and optimizers keep and send: conventions.yaml, whose comments explain it and name the sources."""

from dataclasses import dataclass
from pathlib import Path

from ...errors.tables import table


@dataclass(frozen=True)
class Engine:
    """One of conventions.yaml's engines."""

    weights: float
    gradients: float
    optimizer: float
    held: bool = True
    accumulated: float = 8.0
    reduced: float = 4.0
    gathered: float = 2.0
    bucket: float = 0.0
    hidden: float = 1.0
    everywhere: bool = False
    per_tensor: bool = False
    keep_gathered: bool = False
    cut_by_cost: bool = False
    tensor_hidden: float = 0.0
    host_seconds: float = 2e-3
    holds_inputs: bool = False
    streams: float = 0.0
    fragmentation: float = 1.1


@dataclass(frozen=True)
class Schedule:
    """One of conventions.yaml's orders of a pipeline's micro-batches."""

    bubble: float
    keeps_all: bool = False


_conventions = table(Path(__file__).with_name("conventions.yaml"))
ENGINES = {name: Engine(**row) for name, row in _conventions["engines"].items()}
SCHEDULES = {name: Schedule(**row) for name, row in _conventions["schedules"].items()}
LOGIT_BYTES: dict[str, float] = _conventions["logit_bytes"]
OPTIMIZER_BYTES: dict[str, int] = _conventions["optimizer_bytes"]
