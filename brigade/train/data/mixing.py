"""Which samples are trained on and which are held out: shares of sources, by size or by weight."""

import numpy as np


def split(
    samples: np.ndarray, rows: np.ndarray, share: float, most: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(kept, held out): a share of the rows, spread evenly, at least one of them where there are two and at most `most`.

    rows: the row that each sample is of; what one long text was split into lies on one side
    """
    own = np.unique(rows)
    held = min(max(1, round(len(own) * share)), max(len(own) - 1, 0), most or len(own))
    chosen = np.isin(rows, own[np.linspace(0, len(own) - 1, held, dtype=int)])
    return samples[~chosen], samples[chosen]


def mix(
    parts: list[np.ndarray], weights: list[float | None], sizes: list[float], seed: int, limit: int | None = None
) -> np.ndarray:
    """The training samples of all sources: all of them, or with weights as many as keep the shares and repeat none; at
    most `limit`, of which the shares hold too: without weights those of the sources' sizes, each source's first ones.

    sizes: samples of each whole source; a part may be less of it, but no less than `limit`
    With weights, the source that is scarcest for its weight is used whole, of each other one a choice by PCG64(seed).
    """
    if any(weight is None for weight in weights):
        counts = _shares(limit, sizes, list(map(len, parts))) if limit else map(len, parts)
        return np.concatenate([part[:count] for part, count in zip(parts, counts, strict=True)])
    whole = min(len(part) / weight for part, weight in zip(parts, weights, strict=True) if weight)
    whole = min(whole, limit or whole)
    chosen = []
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        count = min(len(part), max(1, round(whole * (weight or 0))))
        chosen.append(np.sort(np.random.default_rng((seed, number)).choice(part, count, replace=False)))
    return np.concatenate(chosen)[:limit]


def _shares(total: int, sizes: list[float], most: list[int]) -> list[int]:
    """`total` in proportion to sizes, or as much of it as there is; of each no more than `most`."""
    counts = [min(int(total * size / sum(sizes)), end) for size, end in zip(sizes, most, strict=True)]
    while sum(counts) < min(total, sum(most)):  # what rounding left
        behind = (i for i in range(len(sizes)) if counts[i] < most[i])
        counts[min(behind, key=lambda i: (counts[i] + 1) / sizes[i])] += 1
    return counts


def beside(chosen: np.ndarray, rows: np.ndarray, dropped: np.ndarray) -> np.ndarray:
    """Of a source's dropped rows (number of the next sample, fate) the fates of those that stand before its last chosen
    sample; where all of its samples are chosen, of all.

    rows: the samples that could be chosen
    """
    if len(chosen) < len(rows):
        dropped = dropped[dropped[:, 0] <= max(chosen, default=-1)]
    return dropped[:, 1]
