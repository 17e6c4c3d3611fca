"""What one operation of a layer computes, moves through memory and keeps for the backward pass."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["product", "attention", "pointwise"]


@dataclass(frozen=True)
class Op:
    """One operation, per token.

    flops: forward; a product costs twice as much backward, attention 2.5 times (it computes the scores again)
    shape: of a product, (inner, outer) width of its weight
    moved, moved_back: bytes read and written, forward and backward
    kept: bytes for the backward pass
    back: bytes that its own backward pass needs besides, at its peak
    split: whether tensor parallelism divides it
    experts: how many weights of that shape the tokens are spread over
    share: of the layers that have it, in a mean layer
    tiled: computed for a tile of tokens at a time, and once more in the backward pass: nothing is kept
    """

    name: str
    kind: Kind
    flops: float = 0.0
    shape: tuple[int, int] = (0, 0)
    moved: float = 0.0
    moved_back: float = 0.0
    kept: float = 0.0
    back: float = 0.0
    split: bool = True
    experts: int = 0
    share: float = 1.0
    tiled: bool = False
