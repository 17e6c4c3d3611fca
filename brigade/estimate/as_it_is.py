"""One configuration's figures, as `plan recipes/NAME/full.yaml` prints them: a recipe as it stands."""

from collections.abc import Mapping

from .. import flags
from . import show
from .header import METHODS, Planned
from .recipe import BESIDE


def show_recipe(path: str, cluster: Mapping[str, str], link: str, trace: bool, margin: float) -> int:
    """Print the estimate of the recipe at `path`; 1 where it does not fit with a share of `margin` left free, else 0.

    cluster: hostfile and gpu in place of the recipe's own; link: the network between hosts, "" for the usual one
    """
    words = ["--recipe", path]
    for key, value in cluster.items():
        words += [f"--{key}", value]
    planned = Planned(flags.load(words), link)
    result, recipe = planned.estimate, planned.settings.recipe
    job, whole = result.job, result.gpu.memory_gib
    again = "layers" if job.checkpointing == "full" else "nothing"
    print(f"{path}: {job.shape.name}, {METHODS[job.method]}, {planned.strategy_name} on {planned.cluster}, "
          f"{recipe.training.optim}, micro-batch {job.micro_batch} x accumulation {job.accumulation} x {job.gpus}, "
          f"{job.sequence:,} tokens, recomputes {again}")  # fmt: skip
    show.describe(result)
    print(f"speed    {result.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {result.mfu:.0f}%")
    if trace:
        beside = planned.settings.recipe_path.with_name(BESIDE)
        model = str(beside.parent) if beside.is_file() else recipe.model.model_name_or_path
        show.both(job, show.tracer(model)(job))
    spare = result.spare_gib - margin * whole
    found = "it fits" if spare >= 0 else f"it does not fit: {-spare:.1f} GiB are lacking"
    print(f"verdict  {found}; {result.device_gib:.1f} of {whole:.1f} GiB, of which {margin:.0%} are to be left free")
    return 0 if spare >= 0 else 1
