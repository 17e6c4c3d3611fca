"""What a GPU has the memory for, at the upper end of its interval: the largest micro-batch, and the fastest of what a recipe
leaves open. No torch."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import product

from ...errors.tables import Document, Fields
from ...train.recipe.batch import Batch
from ...train.recipe.schema import BY_MEMORY, Recipe
from ...train.recipe.training_section import TrainingSection
from ...train.strategy import Strategy
from ..costs.estimate import Estimate, estimate
from ..hardware import Gpu
from .images import NOT_ASKED, Asked
from .job_of_run import NotCovered, job_of_run
from .workload import Workload

Count = Callable[[Recipe, Batch], Estimate]
FILLED = 4  # micro-batches for each stage of a pipeline, which then idles for a fifth of a step at most
NEAR = 1.02  # times the fastest step, within which what takes the least memory is taken: formulas tell no less apart


def automatic(batch: Batch, strategy: Strategy) -> Iterator[Batch]:
    """Yield the batch with each micro-batch that `auto` may take, the largest first."""
    share, stages = batch.micro * batch.accumulation, strategy.axes.stages
    least = FILLED * stages if stages > 1 else 1
    for micro in range(8, 0, -1):
        if share % micro == 0 and (micro == 1 or share // micro >= least):
            yield replace(batch, micro=micro, accumulation=share // micro)


def counting(
    strategy: Strategy, ranks: int, node_size: int, config: Document, device: Gpu, place: str, asked: Asked = NOT_ASKED
) -> Count:
    """Return what estimates a recipe with a batch on `device`. The arguments and errors are those of job_of_run."""

    def count(recipe: Recipe, batch: Batch) -> Estimate:
        job = job_of_run(recipe, strategy, batch, ranks, node_size, config, device.kind, place=place, asked=asked)
        return estimate(job, device)

    return count


def largest_fit(recipe: Recipe, strategy: Strategy, batch: Batch, count: Count) -> tuple[int, str]:
    """Return (the largest micro-batch that fits the GPU, in words how far it fills it).

    It is at most 8, divides a rank's share, leaves a pipeline micro-batches to fill it, and fits at the upper end of its
    interval; else 1. count: of counting()
    """
    anywhere = recipe.cluster.model_copy(update={"network": None})  # memory is the same whatever it is
    recipe = recipe.model_copy(update={"cluster": anywhere})
    for tried in automatic(batch, strategy):
        result = count(recipe, tried)
        filled = f"{result.device_gib:.0f} of {result.gpu.memory_gib:.0f} GiB"
        if result.fits:
            return tried.micro, f"the planner's: {filled}"
    return 1, f"the least; the planner counts {filled}, which may not fit"


def fastest_fit(
    recipe: Recipe, keys: Collection[str], strategy: Strategy, batch: Batch, count: Count
) -> tuple[Fields, str]:
    """Return (the values of `keys`, of schema.BY_MEMORY, with which the GPU trains fastest among those that fit at the upper end
    of their interval and keep the margin of `plan`, in words how far they fill it); those that take the least where none does.

    An automatic micro-batch is then the one with which that is so. count: of counting()
    """
    batches = [batch]
    if recipe.training.per_device_train_batch_size == "auto":
        batches = list(automatic(batch, strategy))
    careful = {key: BY_MEMORY[key] for key in keys}
    ways = [dict(zip(keys, values, strict=True)) for values in product(*map(_values, keys))]

    def counted(way: Fields, tried: Batch) -> Estimate:
        training = recipe.training.model_copy(update=way)
        return count(recipe.model_copy(update={"training": training}), tried)

    least = min((counted(careful, tried) for tried in batches), key=lambda result: result.most_gib)
    fitting = []
    for way, tried in product(ways, batches):
        try:
            result = counted(way, tried)
        except NotCovered:  # of the careful way it has told
            continue
        if result.fits and result.spare_gib >= Workload.margin * result.gpu.memory_gib:
            fitting.append((result, way))
    if not fitting:
        return careful, f"the least; the planner counts {_filled(least)}"
    soonest = NEAR * min(result.time.total for result, _ in fitting)
    near = [(result, way) for result, way in fitting if result.time.total <= soonest]
    result, way = min(near, key=lambda found: found[0].most_gib)
    return way, f"the planner's: {_filled(result)}"


def _values(key: str) -> tuple[object, object]:
    """What `auto` may become: the key's default, and what takes the least memory."""
    return TrainingSection.model_fields[key].default, BY_MEMORY[key]


def _filled(result: Estimate) -> str:
    return f"{result.device_gib:.0f} of {result.gpu.memory_gib:.0f} GiB, up to {result.most_gib:.0f}"
