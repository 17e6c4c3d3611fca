"""What engines, losses and optimizers keep and send: conventions.yaml explains each row and names its source."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
    host_sharded: float = 1.0
    host_rank: float = 0.0
    host_norm: float = math.inf
    collectives: int = 1
    scatters_hidden: bool = True


class Schedule(NamedTuple):
    """One of conventions.yaml's orders of a pipeline's micro-batches."""

    bubble: float
    keeps_all: bool = False


class Rows(NamedTuple):
    """One of conventions.yaml's kinds of rows that an objective reads."""

    samples: int
    mismatched: int


_ROWS = table(Path(__file__).with_name("conventions.yaml"))
ENGINES = {name: Engine(**row) for name, row in _ROWS["engines"].items()}
SCHEDULES = {name: Schedule(**row) for name, row in _ROWS["schedules"].items()}
ROWS = {name: Rows(**row) for name, row in _ROWS["rows"].items()}
LOGIT_BYTES: dict[str, float] = dict(_ROWS["logit_bytes"])
DRIVERS: dict[str, float] = dict(_ROWS["drivers"])
