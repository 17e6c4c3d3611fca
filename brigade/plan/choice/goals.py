"""Find the size of a cluster that serves a goal, what it costs, and what would train the same tokens sooner or cheaper.

How many tokens a recipe reads of its own data is known here for the data sets of our recipes: data_sets.yaml.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import UserError
from ...errors.console import counted, figure
from ...errors.tables import table
from ...train.recipe.schema import Recipe
from ..shape.lora import trained_parameters
from .search import candidates, chosen, fastest
from .workload import Candidate, Cluster, Workload, powers_below

# Of hosts whose network nobody has measured.
MEASURE = (
    "Measure the network first (`python -m brigade check --hostfile FILE --calibrate`, by which plan counts afterwards)"
)
SOONER, CHEAPER, LARGER, LIGHTER = 1.03, 0.8, 1.15, 2.0  # from which gain on another way is worth a sentence
BILLION = 1e9
TOKENS = {name: entry["tokens"] for name, entry in table(Path(__file__).with_name("data_sets.yaml")).items()}


@dataclass(frozen=True)
class Answer:
    """The strategies on a cluster or on its first hosts, best first, and the one to take."""

    workload: Workload
    cluster: Cluster
    ranked: list[Candidate]
    winner: Candidate | None

    @property
    def slow(self) -> Candidate | None:
        """The fastest strategy that is possible and slow, where none is recommended; None where nothing fits."""
        return None if self.winner else fastest(self.ranked)

    @property
    def speed(self) -> float:
        """Tokens per second on all GPUs; 0 where nothing fits."""
        return self.winner.estimate.tokens_per_second_per_gpu * self.cluster.gpus if self.winner else 0.0

    @property
    def one_card_speed(self) -> float:
        """The speed if one of each host's network cards does all the work."""
        result = self.winner.estimate if self.winner else None
        return self.speed * result.time.total / result.one_card_seconds if result else 0.0

    def hours(self, tokens: float = BILLION) -> float:
        return tokens / self.speed / 3600

    def slow_hours(self, tokens: float = BILLION) -> float:
        """Return the hours at the slow end of the interval, by which a deadline is judged."""
        result = self.winner.estimate if self.winner else None
        return self.hours(tokens) * result.time_interval()[1] / result.time.total if result else math.inf

    def gpu_hours(self) -> float:
        return self.hours() * self.cluster.gpus

    @property
    def size(self) -> str:
        hosts, gpus = counted(self.cluster.nodes, "host"), counted(self.cluster.gpus, "GPU")
        return f"{hosts} with {gpus}"


def answer(workload: Workload, cluster: Cluster) -> Answer:
    """Judge every strategy for a workload on a cluster, and choose one."""
    ranked = candidates(workload, cluster)
    return Answer(workload, cluster, ranked, chosen(ranked))


def sizes(workload: Workload, cluster: Cluster, inside: bool) -> Iterator[Answer]:
    """Yield the answers for fewer hosts, and with `inside` for fewer GPUs on one host, where something fits."""
    smaller = [replace(cluster, nodes=number, all=0) for number in cluster.fewer]
    if inside:
        smaller += [replace(cluster, nodes=1, all=0, node_size=gpus) for gpus in powers_below(cluster.node_size)]
    for fewer in smaller:
        try:
            smaller_answer = answer(workload, fewer)
        except UserError:  # the batch does not divide
            continue
        if smaller_answer.winner:
            yield smaller_answer


def pick(whole: Answer, goal: str, deadline: float = 0.0, tokens: float = BILLION) -> tuple[Answer, list[str]]:
    """Return (the answer that serves the goal, sentences to begin with). deadline: hours for so many tokens, 0 for none.

    A deadline is met where even the slow end of the interval meets it. Sizes are compared by what is expected of each.
    """
    if not goal and not deadline:
        return whole, better(whole)
    able = [size for size in [whole, *sizes(whole.workload, whole.cluster, True)] if size.winner]
    if not able:
        return whole, []
    in_time = [size for size in able if not deadline or size.slow_hours(tokens) <= deadline]
    if not in_time:
        fastest = min(able, key=lambda size: size.slow_hours(tokens))
        took = f"{_hours_in_words(fastest, tokens)}, on {fastest.size}"
        return fastest, [f"No size of this cluster is sure to keep the deadline of {deadline:g} h: at best {took}."]
    least = min(size.gpu_hours() for size in in_time)  # of two as cheap, the smaller
    best = {
        "fastest": max(in_time, key=lambda size: size.speed),
        "fewest-gpus": min(in_time, key=lambda size: (size.cluster.gpus, size.hours())),
    }.get(goal) or min(in_time, key=lambda size: (round(size.gpu_hours() / least, 2), size.cluster.gpus))
    words = {"fastest": "The fastest", "fewest-gpus": "The fewest GPUs on which it fits"}.get(goal, "The cheapest")
    first = measure_first(best, (size for size in able if size.cluster.nodes < best.cluster.nodes))
    kept = f". There {_hours_in_words(best, tokens)}, which the deadline is judged by" if deadline else ""
    if len(in_time) == 1:
        which = f"The only size of this cluster {'that keeps the deadline' if deadline else 'on which it fits'}"
    else:
        kept_by = " that keep the deadline" if deadline else ""
        which = f"{words} of {len(in_time)} sizes of this cluster{kept_by} by what is expected of each"
    return best, [f"{which}: {best.size}{kept}.", *first]


def _hours_in_words(size: Answer, tokens: float) -> str:
    expected, slow = (f"{hours:,.3g}" for hours in (size.hours(tokens), size.slow_hours(tokens)))
    return f"{tokens_in_words(tokens)} tokens take {expected} hours, and {slow} at the slow end of the interval"


def measure_first(whole: Answer, fewer: Iterable[Answer]) -> list[str]:
    """Return a sentence where fewer hosts would train sooner, if one of each host's network cards did all the work."""
    best = max(fewer, key=lambda one: one.one_card_speed, default=None)
    if best is None or whole.one_card_speed == whole.speed or best.one_card_speed < SOONER * whole.one_card_speed:
        return []
    against = f"{best.one_card_speed:,.0f} tokens/s in all against {whole.one_card_speed:,.0f}"
    sooner = f"{best.size} train{'s' * (best.cluster.nodes == 1)} sooner, {against}"
    return [f"{MEASURE}: if one card of each host does all the work, {sooner}."]


def better(whole: Answer) -> list[str]:
    """Return a sentence for each way that trains the same tokens sooner or much cheaper: fewer hosts, a larger batch, LoRA."""
    if not whole.winner:
        return []
    sentences: list[str] = []
    fewer = list(sizes(whole.workload, whole.cluster, False))
    fastest = max(fewer, key=lambda one: one.speed, default=whole)
    cheapest = min(fewer, key=Answer.gpu_hours, default=whole)
    if fastest.speed > SOONER * whole.speed:
        sooner = _against(fastest, whole)
        sentences.append(f"More is not faster: on {fastest.size} the same tokens train sooner, {sooner}.")
    else:
        if cheapest.gpu_hours() < CHEAPER * whole.gpu_hours():
            took = f"{figure(cheapest.gpu_hours(), 0)} GPU-hours for a billion tokens instead of {figure(whole.gpu_hours(), 0)}"
            sentences.append(f"On {cheapest.size} the same tokens are cheaper: {took} (--goal cheapest).")
        sentences += measure_first(whole, fewer)
    waits = whole.winner.estimate.time
    if (waits.across + waits.inside + waits.bubble + waits.offload + waits.optimizer) > 0.15 * waits.total:
        for times in (4, 2):
            larger = answer(replace(whole.workload, batch=times * whole.workload.batch), whole.cluster)
            if larger.speed > LARGER * whole.speed:
                batch = f"--global_batch_size {larger.workload.batch}"
                sooner = _against(larger, whole)
                sentences.append(f"{batch} trains the same tokens sooner, {sooner}; its steps are fewer.")
                break
    if whole.workload.method == "full":
        trained = trained_parameters(whole.workload.shape, 16, ())
        lora = answer(replace(whole.workload, method="lora", trained=trained), whole.cluster)
        if lora.speed > (SOONER if whole.winner.choice.offload else LIGHTER) * whole.speed:
            sentences.append(f"--method lora trains the same tokens sooner, {_against(lora, whole)}.")
    return sentences


def _against(one: Answer, other: Answer) -> str:
    """Compare what is expected of two: intervals of like configurations err together."""
    here, there = (f"{float(f'{answer.speed:.3g}'):,.0f}" for answer in (one, other))
    return f"{here} tokens/s in all against {there}, both as expected"


# ---- tokens --------------------------------------------------------------------------------------------------------
def own_tokens(recipe: Recipe) -> float | None:
    """Return about how many tokens the recipe's epochs have; None where data_sets.yaml does not name its data set."""
    data, training = recipe.data, recipe.training
    in_part = data.train_file or data.max_train_samples or data.dataset_train_split != "train"
    if training.max_steps > 0 or in_part or data.dataset_name not in TOKENS:
        return None
    return training.num_train_epochs * TOKENS[data.dataset_name]


def million(tokens: float) -> str:
    """Return `18 million`, or from a billion on `1.5 billion`; below a million `20,000`."""
    if tokens < 1e6:
        return f"{tokens:,.0f}"
    return f"{tokens / 1e9:,.3g} billion" if tokens >= 1e9 else f"{tokens / 1e6:,.3g} million"


def tokens_in_words(tokens: float) -> str:
    """Return `a billion`, or `5 billion`."""
    return "a billion" if tokens == BILLION else million(tokens)


# ---- money -------------------------------------------------------------------------------------------------------
def price(kind: str, given: float | None = None) -> tuple[float, str]:
    """Return (US dollars for an hour of that kind of GPU, who says so); (0, "") where nobody does."""
    if given is not None:
        return given, "--price"
    known = table(Path(__file__).with_name("prices.yaml"))
    return (known["usd"][kind], known["listed"]) if kind in known["usd"] else (0.0, "")
