"""What checkpoints, evaluations and other parts of a run may use of the Trainer: more than those of a step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..engines.engine import StepContext
from ..local.local_steps import Replica
from ..run.hooks import Feature

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainerCallback


class Saves(Protocol):
    """Checkpoints, as whoever waits for one sees them. blocked: seconds for which the last one held this rank up"""

    @property
    def blocked(self) -> float: ...

    def wait(self) -> None: ...

    def let_finish(self) -> None: ...


class Judgement(Protocol):
    """What is known of the current step, once its losses and its gradients' norm have been looked at (nonfinite.py)."""

    counts: Any
    micro_losses: list[torch.Tensor]
    logged_before: torch.Tensor | None
    dropped: bool
    norm: Any


class TrainingContext(StepContext, Protocol):
    """The same, and what surrounds a step: evaluations, checkpoints and the parts of a run themselves.

    replica: what this run's other replicas ask of it (replica.py)
    """

    processing_class: PreTrainedTokenizerBase
    replica: Replica
    features: list[Feature]
    nonfinite: Judgement
    checkpoints: Saves
    collate: Any
    control: Any
    callback_handler: Any

    def at_rest(self) -> AbstractContextManager[object]: ...

    def add_callback(self, callback: TrainerCallback) -> None: ...

    def remove_callback(self, callback: TrainerCallback) -> None: ...

    def answers(self, questions: Any, longest: int) -> list[list[int]]: ...

    def log(self, logs: dict[str, float]) -> None: ...

    def loads_by_itself(self, checkpoint: Path) -> bool: ...

    def complete_weights(self, checkpoint: Path) -> None: ...

    def store_flos(self) -> None: ...
