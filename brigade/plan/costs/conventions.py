"""What engines, losses and optimizers keep and send: conventions.yaml, whose comments explain it and name the sources."""

import math
from dataclasses import dataclass
from pathlib import Path

from ...errors.tables import table
from ...train.strategy.state_bytes import OPTIMIZER_BYTES


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
    host_sharded: float = 1.0
    host_rank: float = 0.0
    host_norm: float = math.inf
    collectives: int = 1
    gathers_hidden: bool = True
    scatters_hidden: bool = True
    listed: bool = False
    holds_inputs: bool = False
    streams: float = 0.0
    dummies: bool = False
    fragmentation: float = 1.1


@dataclass(frozen=True)
class Schedule:
    """One of conventions.yaml's orders of a pipeline's micro-batches."""

    bubble: float
    keeps_all: bool = False


ENGINES: dict[str, Engine] = {}
SCHEDULES: dict[str, Schedule] = {}
LOGIT_BYTES: dict[str, float] = {}


def take(path: Path) -> None:
    """Know what a file in the format of conventions.yaml says; benchmarks have one of what train.py does not run."""
    rows = table(path)
    ENGINES.update({name: Engine(**row) for name, row in rows["engines"].items()})
    SCHEDULES.update({name: Schedule(**row) for name, row in rows.get("schedules", {}).items()})
    LOGIT_BYTES.update(rows["logit_bytes"])
    OPTIMIZER_BYTES.update(rows.get("optimizer_bytes", {}))


take(Path(__file__).with_name("conventions.yaml"))
