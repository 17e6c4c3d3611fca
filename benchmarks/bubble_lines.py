"""Time lines of one step of a pipeline: how long ranks idle, and what only the order of the passes would give."""

import itertools
from collections.abc import Callable, Sequence

# Of a stage: number of the stage, kind of pass, number of the micro-batch, begin and end in seconds.
# Kinds: F forward, B backward whole, I gradients of inputs, W gradients of weights
Pass = tuple[int, str, int, float, float]
Line = Sequence[Pass]  # of one rank, in order
WORK = {"F": 1, "B": 2, "I": 1, "W": 1}


def work(kind: str, first: bool) -> int:
    """How many thirds of a stage's work for a micro-batch a pass is, where forward, inputs and weights cost the same.

    first: it is the first stage. Nobody needs gradients of its inputs, so torch leaves them out and computes the whole backward
    pass with the weights (torch 2.13, distributed/pipelining/stage.py: backward_one_chunk, backward_weight_one_chunk).
    """
    if first and kind in "IW":
        return 2 * (kind == "W")
    return WORK[kind]


def step_seconds(lines: Sequence[Line]) -> float:
    """From the first pass on any rank to the end of the last."""
    return max(each[4] for line in lines for each in line) - min(each[3] for line in lines for each in line)


def busy_seconds(line: Line) -> float:
    return sum(end - begin for *_, begin, end in line)


def idle(lines: Sequence[Line]) -> list[float]:
    """Return the share of the step in which each rank computes nothing."""
    whole = step_seconds(lines)
    return [1 - busy_seconds(line) / whole for line in lines]


def idle_between(lines: Sequence[Line]) -> list[float]:
    """Likewise of the time between a rank's own first and last pass."""
    return [1 - busy_seconds(line) / step_seconds([line]) for line in lines]


def replay(lines: Sequence[Line], seconds: Callable[[int, str], float]) -> list[list[Pass]]:
    """The same passes in the same order, each as soon as its rank and what it needs are there. Nothing is sent in no time.

    seconds: of a pass, by stage and kind
    Raises ValueError for an order in which ranks would wait for each other for ever.
    """
    last = max(each[0] for line in lines for each in line)
    done: dict[tuple[str, int, int], float] = {}
    found: list[list[Pass]] = [[] for _ in lines]
    left = [list(reversed(line)) for line in lines]
    while any(left):
        before = sum(map(len, left))
        for line, todo in zip(found, left, strict=True):
            while todo:
                stage, kind, number, *_ = todo[-1]
                needed = _needed(stage, kind, number, last)
                if needed and needed not in done:
                    break
                begin = max(line[-1][4] if line else 0.0, done[needed] if needed else 0.0)
                end = begin + seconds(stage, kind)
                done["G" if kind in "BI" else kind, stage, number] = end
                line.append((stage, kind, number, begin, end))
                todo.pop()
        if sum(map(len, left)) == before:
            raise ValueError(f"no rank can go on: {[todo[-1][:3] for todo in left if todo]}")
    return found


def _needed(stage: int, kind: str, number: int, last: int) -> tuple[str, int, int] | None:
    """What a pass takes from another stage: (F or G for the gradient, stage, micro-batch)."""
    if kind == "F":
        return ("F", stage - 1, number) if stage else None
    if kind == "W":
        return None
    return ("G", stage + 1, number) if stage < last else ("F", stage, number)


def by_order(lines: Sequence[Line]) -> list[float]:
    """Idle shares of this order of passes, of stages that all take as long."""
    return idle(replay(lines, lambda stage, kind: float(work(kind, not stage))))


def at_their_own_times(lines: Sequence[Line]) -> list[float]:
    """Idle shares of this order where each pass takes the mean time that those of its stage and kind took."""
    took: dict[tuple[int, str], list[float]] = {}
    for stage, kind, _, begin, end in itertools.chain(*lines):
        took.setdefault((stage, kind), []).append(end - begin)
    return idle(replay(lines, lambda stage, kind: sum(took[stage, kind]) / len(took[stage, kind])))


def held(line: Line) -> float:
    """Return how many micro-batches a rank keeps the activations of all its stages of, at most.

    It keeps them from the forward pass until it has the gradients of weights.
    """
    stages, now, most = len({each[0] for each in line}), 0, 0
    for _, kind, *_ in line:
        now += (kind == "F") - (kind in "BW")
        most = max(most, now)
    return most / stages
