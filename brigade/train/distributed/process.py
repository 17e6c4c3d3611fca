"""What belongs to this process of the operating system, and not to a run: several runs may follow each other in one process.

`this_process` holds it, and is not an argument: nobody could hand it to a signal handler, to the fork that precedes every import
(launched.py), to a hook inside another package's model, or to torch when it makes a group; and what it stands for exists only
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .. import upstream
from .heartbeat import Heartbeat
from .stop import Signals
from .supervised import Agent
from .timeline import Timeline

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from torch.distributed import ProcessGroup, Store

    from .exchange import T


class Peers(Protocol):
    """The other replicas' ranks, as local/peers.py has them. elastic: whether each replica is a run of its own"""

    elastic: bool

    def gather(self, value: T) -> list[T]: ...

    def rejoin(self) -> None: ...


class ForwardPass:
    """What is said of the forward pass that runs, besides the arguments of its model: a layer deep inside another package's model
    reads it, and engines would cast an argument or move it to the device. It is over before the backward pass, in
    which checkpointed layers are computed again, on GPUs by another thread: none of them reads it.

    end_to_end: whether its sequences hold several samples, where that is known
    of_tower: keyword arguments that readers have made for the tower of images, where they have
    weights: of each target, fp32 in their order; None: all weigh 1
    teacher: what a teacher says of the targets, where the run distils one (loss/distillation.py: Said)
    """

    end_to_end: bool | None = None
    of_tower: Mapping[str, Any] | None = None
    weights: Tensor | None = None
    teacher: Any = None

    def told(
        self,
        end_to_end: bool | None = None,
        of_tower: Mapping[str, Tensor | np.ndarray] | None = None,
        weights: Tensor | None = None,
        teacher: object = None,
    ) -> AbstractContextManager[None]:
        """Say this of the pass inside, and nothing of it afterwards: it would be wrong for another model's pass."""
        said = {"end_to_end": end_to_end, "of_tower": of_tower, "weights": weights, "teacher": teacher}
        return upstream.replaced(self, **said)


class Process:
    """agent: who hears of this rank under `launch`; heartbeat: where it stands; signals: what it was asked by signals
    timeline: what its newest run did until the end of its first step
    rank_0: its process and when that began, where all ranks are on this host
    forward_pass: what layers deep inside of a model have to know of the one that runs
    store: that of all ranks, once a run had replicas; peers: while each replica of the run is a world of its own
    sequence_group: over whose ranks a run divides sequences, where it does; attention reads it, also when it is computed again in
        the backward pass, on GPUs in another thread
    own: whether it was started for a run; else a program of somebody's own calls train.main()
    unfused: what modules of models had before Liger's kernels took the place of their classes and functions, which is for the
        whole process: {module: {name: value}}
    refused: files to which this process has said that it adds nothing
    """

    sequence_group: ProcessGroup

    def __init__(self) -> None:
        self.agent = Agent()
        self.heartbeat = Heartbeat()
        self.timeline = Timeline()
        self.signals = Signals(self.agent)
        self.forward_pass = ForwardPass()
        self.own = False
        self.rank_0: tuple[int, str] | None = None
        self.store: Store | None = None
        self.peers: Peers | None = None
        self.unfused: dict[str, dict[str, object]] = {}
        self.refused: set[Path] = set()
        self._turns: Counter[str] = Counter()

    def turn(self, name: str) -> int:
        """Return how often this was asked for `name` before: as often on every rank, where it makes a key of a store that other
        runs of the process use, too."""
        self._turns[name] += 1
        return self._turns[name] - 1


this_process = Process()
