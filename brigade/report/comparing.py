"""Several runs: what differs between their recipes, and whether their losses differ by more than chance explains.

Two runs that read the same samples in the same order meet the same hard and easy batches, so the difference of their losses at
one step is less noisy than either loss. Neighbouring differences are alike. The standard error of their mean therefore comes from
a moving-block bootstrap (Kuensch 1989, Annals of Statistics 17(3)), which draws whole blocks of neighbours. The interval is
Student's, with as many values as there are blocks: few blocks say little about how much they vary.
"""

import math
import statistics
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors.tables import Fields
from ..train.recipe.objectives import ADAPTERS_OFF, DISTILL, MODEL, OBJECTIVES, SFT, ObjectiveKeys
from ..train.recipe.schema import flat
from . import facts
from .records import Entry, Record, number, numbers

FEWEST = 16  # differences that an interval needs
EVALUATIONS = 6  # the same for evaluations: each is a mean over all held-out samples
LAST = 0.25  # the share at the end of what two runs have in common that is compared
DRAWS = 4_000
# Keys of run.yaml's record that cause no difference, or stand elsewhere on the page.
_NO_CAUSE = ("identity", "started", "command", "overridden", "prediction", "ds_config", "lengthened")

# Keys of ObjectiveKeys that leave a loss what it is: how it is computed, and what is logged beside it.
_SAME_LOSS = ("answer_score", "metric_for_best_model", "share_prompts", "precompute_ref_log_probs")
_LOSS = tuple(key for key in ObjectiveKeys.model_fields if key not in _SAME_LOSS)


@dataclass
class Comparison:
    """Tables and sentences of a page. different: key, and its value in each run; verdicts: for each run but the first, the
    conclusion, then its reasons"""

    different: facts.Table = field(default_factory=lambda: ([], []))
    verdicts: list[list[str]] = field(default_factory=list)
    overview: facts.Table = field(default_factory=lambda: ([], []))


def compare(records: list[Record]) -> Comparison:
    """Compare each run with the first one."""
    verdicts = [verdict(records[0], other) for other in records[1:]]
    return Comparison(differences(records), verdicts, _overview(records))


def differences(records: list[Record]) -> facts.Table:
    """The keys whose values differ between runs: the recipe's first, then versions, hosts and the rest."""
    trees = [{key: value for key, value in record.settings.items() if key != "run"} for record in records]
    resolved = [{key: value for key, value in record.run.items() if key not in _NO_CAUSE} for record in records]
    rows = []
    for tables in ([flat(tree) for tree in trees], [flat(tree) for tree in resolved]):
        for key in dict.fromkeys(key for table in tables for key in table):
            values = [table.get(key) for table in tables]
            if any(value != values[0] for value in values[1:]):
                rows.append([key, *(facts.plain(value) for value in values)])
    return ["key", *(record.name for record in records)], rows


def verdict(first: Record, other: Record) -> list[str]:
    """Say in sentences whether the other run's loss is lower, by how much and how surely, or why nobody can tell."""
    between = f"{other.name} and {first.name}"
    data = [record.run.get("data") for record in (first, other)]
    if None not in data and data[0] != data[1]:
        return [f"{between}: they read different data or encode it differently, so their losses cannot be compared."]
    losses = [_loss_keys(record) for record in (first, other)]
    unlike = [key for key in _LOSS if losses[0].get(key) != losses[1].get(key)]
    unlike = unlike[:1] if "objective" in unlike else unlike  # whose keys are others
    why = f"they minimise different losses ({' and '.join(unlike)}), which cannot be compared."
    if unlike and not {first.objective, other.objective} <= {SFT, DISTILL}:  # held out, theirs is the cross-entropy
        return [f"{between}: {why}"]
    training = _Difference(f"Training loss: {why}")
    if not unlike:
        training = _difference(first, other, "training loss", first.steps, other.steps, FEWEST, LAST)
    held_out = _held_out(first, other)
    known = [difference for difference in (training, held_out) if difference.low is not None]
    signs = {difference.sign for difference in known}
    if not known:
        conclusion = "too little was logged at the same place to tell which loss is lower"
    elif signs == {0}:
        conclusion = "the data cannot tell which loss is lower"
    elif {-1, 1} <= signs:
        conclusion = "training and held-out loss disagree; the data cannot tell which run is better"
    elif held_out.low is not None and held_out.sign == 0:
        conclusion = f"{'lower' if -1 in signs else 'higher'} training loss, but the held-out loss cannot be told apart"
    else:
        conclusion = f"{other.name} has the {'lower' if -1 in signs else 'higher'} loss"
    return [f"{between}: {conclusion}.", training.words, held_out.words]


@dataclass
class _Difference:
    """How the other run's loss differs from the first one's. low, high: the 95 % interval, None where there is none"""

    words: str
    low: float | None = None
    high: float | None = None

    @property
    def sign(self) -> int:
        """-1: the loss is lower, 1: it is higher, 0: nobody can tell."""
        return 0 if self.low is None or self.high is None else (self.low > 0) - (self.high < 0)


def _held_out(first: Record, other: Record) -> _Difference:
    """Compare the evaluations of as many samples as the last ones had: max_eval_samples may be another. What says no number,
    as evaluations since the last checkpoint did once, is compared too."""
    counts = [[number(entry.get("samples")) for entry in record.evaluations] for record in (first, other)]
    samples = [next((count for count in reversed(of_one) if count is not None), None) for of_one in counts]
    if None not in samples and samples[0] != samples[1]:
        of_each = " and ".join(f"{count:,.0f}" for count in samples)
        return _Difference(f"Held-out loss: it is of {of_each} samples, and cannot be compared (max_eval_samples).")
    ours, theirs = (
        [entry for entry in record.evaluations if number(entry.get("samples")) in (None, count)]
        for record, count in zip((first, other), samples, strict=True)
    )
    return _difference(first, other, "held-out loss", ours, theirs, EVALUATIONS, 0.5)


def _difference(
    first: Record, other: Record, loss: str, ours: list[Entry], theirs: list[Entry], fewest: int, share: float
) -> _Difference:
    by = "step" if len({record.training.get("global_batch_size") for record in (first, other)}) == 1 else "tokens"
    places, values = _paired(ours, theirs, by)
    values = values[-max(fewest, math.ceil(share * len(values))) :] if len(values) else values
    if not len(values):
        return _Difference(f"{loss.capitalize()}: none was logged at the same {by}.")
    unit = "logged steps" if loss == "training loss" else "evaluations"
    if len(values) < fewest:
        last = f"{_signed(float(values[-1]))} at {by} {facts.shown(places[-1])}"
        return _Difference(f"{loss.capitalize()}: {last}; {len(values)} {unit} in common are too few for an interval.")
    low, high = interval(values)
    where = f"over the last {len(values)} {unit} that both have (by {by})"
    mean = f"{_signed(float(values.mean()))} {where}, 95 % interval {low:+.4f} to {high:+.4f}"
    return _Difference(f"{loss.capitalize()} of {other.name} against {first.name}: {mean}.", low, high)


def _signed(value: float) -> str:
    return f"{value:+.4f} nats ({'lower' if value < 0 else 'higher'})"


def _loss_keys(record: Record) -> Fields:
    """What a recipe says of the loss that it minimises, with the defaults of its objective."""
    known = OBJECTIVES.get(record.objective, OBJECTIVES[SFT])
    defaults = {key: ObjectiveKeys.model_fields[key].default for key in _LOSS}
    defaults |= {"beta": known.beta, "loss_type": next(iter(known.loss_types), None)}
    usual = (None, MODEL, ADAPTERS_OFF)  # by either a reference is the weights that training begins with
    said = {key: value for key, value in record.training.items() if key in _LOSS and value not in usual}
    return defaults | said


def _paired(ours: list[Entry], theirs: list[Entry], by: str) -> tuple[list[float], NDArray[np.float64]]:
    """(places, their losses minus ours): by steps where both have one; by tokens at ours, with theirs interpolated linearly."""
    tables = []
    for entries in (ours, theirs):
        pairs = ((number(entry.get(by)), number(entry.get("loss"))) for entry in entries)
        tables.append({x: y for x, y in pairs if x is not None and y is not None and math.isfinite(x + y)})
    if by == "step":
        places = sorted(tables[0].keys() & tables[1].keys())
        return places, np.array([tables[1][place] - tables[0][place] for place in places])
    if len(tables[1]) < 2:
        return [], np.array([])
    xs = sorted(tables[1])
    places = [place for place in sorted(tables[0]) if xs[0] <= place <= xs[-1]]
    theirs_there = np.interp(places, xs, [tables[1][x] for x in xs])
    return places, theirs_there - np.array([tables[0][place] for place in places])


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of such differences, the same each time for the same values."""
    count = len(values)
    length = max(1, min(round(2 * count ** (1 / 3)), count // 6))
    starts = np.random.default_rng(0).integers(0, count - length + 1, (DRAWS, math.ceil(count / length)))
    lengths = np.full(starts.shape[1], length)
    lengths[-1] -= lengths.sum() - count  # as many values are drawn as there are
    before = np.concatenate([[0.0], np.cumsum(values)])  # before[i]: the sum of the first i values
    means = (before[starts + lengths] - before[starts]).sum(axis=1) / count
    blocks = count / length
    error = means.std() * math.sqrt(blocks / (blocks - 1))
    reach = np.percentile(np.random.default_rng(0).standard_t(blocks - 1, 40 * DRAWS), 97.5) * error
    return float(values.mean() - reach), float(values.mean() + reach)


def _overview(records: list[Record]) -> facts.Table:
    """A table with a row for each run."""
    keys = list(dict.fromkeys(key for record in records for key in facts.summary(record)))
    rows = []
    for record in records:
        known = facts.summary(record)
        losses = [loss for loss in numbers(record.steps, "loss") if math.isfinite(loss)]
        tail = facts.shown(statistics.fmean(losses[-max(1, len(losses) // 10) :])) if losses else ""
        rows.append([record.name, record.verdict[0], tail, *(known.get(key, "") for key in keys)])
    return ["run", "state", "training loss, mean of the last tenth", *keys], rows
