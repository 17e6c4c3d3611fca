"""Which rank computes on which whole matrix where ranks hold parts of them, or copies, and what is sent for it.

Each matrix has one owner: the rank that holds most of it, and among equals the one with the least work so far. So ZeRO-1, which
cuts few matrices, sends little; under FSDP2 each rank owns as many as any other; and under DDP no matrix is computed twice.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

# Elements of updates that a rank receives at once, beyond those of one matrix: 1 GiB in bfloat16. DDP's ranks receive all.
RECEIVED = 2**29

Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Matrix:
    """A whole matrix.

    parameter: number of the parameter that it is, or lies in (a fused expert); start: its first element there
    held: the ranges of its elements, each with the ranks that hold it, from the first to the last
    """

    parameter: int
    start: int
    rows: int
    columns: int
    owner: int
    held: tuple[tuple[Range, tuple[int, ...]], ...]

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def source(self, ranks: tuple[int, ...]) -> int:
        """Return which of the ranks that hold a range sends it to the owner: the owner itself, or the one nearest in number."""
        return min(ranks, key=lambda rank: (abs(rank - self.owner), rank))


def divide(
    shapes: Sequence[tuple[int, ...]], held_by_rank: Sequence[Sequence[Sequence[Sequence[int]]]]
) -> list[Matrix]:
    """Return all matrices in the parameters' order, each with its owner.

    shapes: of each parameter: (rows, columns), or (experts, rows, columns), which is a matrix for each expert
    held_by_rank: for each rank and each parameter, the ranges of its flattened elements that the rank holds
    """
    matrices, work = list[Matrix](), [0] * len(held_by_rank)
    for number, shape in enumerate(shapes):
        rows, columns = shape[-2:]
        size, count = rows * columns, shape[0] if len(shape) == 3 else 1
        of_rank = [ranges[number] for ranges in held_by_rank]
        for start in range(0, size * count, size):
            ranks_of, most = defaultdict[Range, list[int]](list), [0] * len(of_rank)
            for rank, ranges in enumerate(of_rank):
                for first, last in ranges:
                    first, last = max(first - start, 0), min(last - start, size)
                    if first < last:
                        ranks_of[first, last].append(rank)
                        most[rank] += last - first
            owner = min(range(len(most)), key=lambda rank: (-most[rank], work[rank], rank))
            work[owner] += size * min(rows, columns)
            held = tuple((part, tuple(ranks)) for part, ranks in sorted(ranks_of.items()))
            starts, stops = [first for (first, _), _ in held], [last for (_, last), _ in held]
            if [*starts, size] != [0, *stops]:
                raise RuntimeError(f"the ranks hold parts of a matrix that do not fit together: {held}")
            matrices.append(Matrix(number, start, rows, columns, owner, held))
    return matrices


def rounds(matrices: Sequence[Matrix], ranks: int) -> list[list[Matrix]]:
    """Divide matrices into rounds. In each, every owner has about as many elements to do as the largest matrix has."""
    if not matrices:
        return []
    largest = max(matrix.size for matrix in matrices)
    queues = [_batches([matrix for matrix in matrices if matrix.owner == rank], largest) for rank in range(ranks)]
    found = list[list[Matrix]]()
    for layer in zip_longest(*queues, fillvalue=()):
        received, this = 0, list[Matrix]()
        for batch in layer:
            each = (
                sum(sum((last - first) * len(who) for (first, last), who in matrix.held) for matrix in batch) // ranks
            )
            if this and received + each > RECEIVED:
                found.append(this)
                received, this = 0, []
            received += each
            this = [*this, *batch]
        found.append(this)
    return found


def _batches(matrices: Sequence[Matrix], largest: int) -> list[list[Matrix]]:
    """Matrices of one owner in their order, in batches of at most `largest` elements."""
    found, size = list[list[Matrix]](), largest
    for matrix in matrices:
        if size + matrix.size > largest:
            found.append([])
            size = 0
        found[-1].append(matrix)
        size += matrix.size
    return found
