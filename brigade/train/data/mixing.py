"""Which samples are trained on and which are held out: shares of sources, by size or by weight."""

import numpy as np


def split(
    samples: np.ndarray, rows: np.ndarray, share: float, most: int | None = None, fewest: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return (kept, held out). Held out is a share of the rows, spread evenly: at least `fewest` where there are more,
    at most `most`.

    rows: the number of the row that each sample comes from. All samples of one long text lie on the same side.
    """
    own = np.unique(rows)
    held = min(max(fewest, round(len(own) * share)), max(len(own) - 1, 0), most or len(own))
    chosen = np.isin(rows, own[np.linspace(0, len(own) - 1, held, dtype=int)])
    return samples[~chosen], samples[chosen]


def mix(
    parts: list[np.ndarray], weights: list[float | None], sizes: list[float], seed: int, limit: int | None = None
) -> np.ndarray:
    """Return the training samples of all sources, at most `limit`.

    Without weights these are all samples, or with a limit the first ones of each source, in proportion to the sources' sizes.
    With weights they are as many as keep the shares without repeating any: the source that is scarcest for its weight is used
    whole, and PCG64(seed) chooses from the others.

    sizes: samples of each whole source; a part may hold fewer of them, but no fewer than `limit`
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
    """Divide `total`, or as much of it as there is, in proportion to sizes; each part is at most its entry of `most`."""
    counts = [min(int(total * size / sum(sizes)), end) for size, end in zip(sizes, most, strict=True)]
    while sum(counts) < min(total, sum(most)):  # what rounding left
        behind = (i for i in range(len(sizes)) if counts[i] < most[i])
        counts[min(behind, key=lambda i: (counts[i] + 1) / sizes[i])] += 1
    return counts


def dropped_beside(chosen: np.ndarray, samples: np.ndarray, dropped: np.ndarray) -> np.ndarray:
    """Return what a source dropped before its last chosen sample, or all of it where all samples are chosen: (rows, 2), of each
    the fate and the max_length of Encoded.dropped.

    samples: those that could be chosen; dropped: (rows, 3), with the number of the next sample before these two
    """
    if len(chosen) < len(samples):
        dropped = dropped[dropped[:, 0] <= max(chosen, default=-1)]
    return dropped[:, 1:]
