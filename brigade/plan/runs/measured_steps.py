"""What a run's first steps were and took, for the comparison with the planner's estimate."""

from ...train.distributed import ranks
from ...train.loop.throughput import STATES, STEPS, WARM_UP, Meter


def measure(meter: Meter, seconds: float, states: tuple[int, ...]) -> dict[str, float]:
    """The largest figures of any rank, of steps that took so many seconds each. A collective.

    states: bytes of STATES on this rank
    """
    usual = [about for abouts, _ in meter.first[WARM_UP:] for about in abouts]
    every = [about for abouts, _ in meter.first for about in abouts]
    waited = sum(waited for _, waited in meter.first[WARM_UP:]) / (STEPS - WARM_UP)
    meter.first, meter.first_steps = [], 0  # done with
    slots, tokens = sum(about.slots for about in usual), max(1, sum(about.tokens for about in usual))
    row = {
        "tokens": slots / len(usual),
        "attended": sum(about.squared_lengths for about in usual) / tokens,
        "labelled": sum(about.logits for about in usual) / slots,
        "row": sum(about.slots * about.length for about in usual) / slots,
        "largest": max(about.slots for about in every),
        "most_labelled": max(about.logits for about in every),
        "seconds": seconds,
        "waited": waited,
        "allocated": meter.training_peak_gib(),
        **{name: size / 2**30 for name, size in zip(STATES, states, strict=True)},
    }
    of_ranks = ranks.gather(row)
    return {key: max(other[key] for other in of_ranks) for key in row}
