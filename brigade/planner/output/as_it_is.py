"""One configuration's figures, as `plan recipes/NAME/full.yaml` prints them: a recipe as it stands."""

from collections.abc import Mapping
from dataclasses import replace

from ...errors.console import figure
from ...recipe import flags
from ..choice.job_of_recipe import BESIDE
from ..choice.search import Cluster, lacks_host, trap
from . import show
from .header import Planned


def show_recipe(path: str, cluster: Mapping[str, str], hosts: Cluster, trace: bool, margin: float) -> int:
    """Print the estimate of the recipe at `path`; 1 where it does not fit with a share of `margin` left free, else 0.

    cluster: hostfile and gpu in place of the recipe's own; hosts: network, memory and disks, where they are not the usual ones
    """
    words = ["--recipe", path]
    for key, value in cluster.items():
        words += [f"--{key}", value]
    planned = Planned(flags.load(words), hosts.link)
    result, recipe = planned.estimate, planned.settings.recipe
    job, whole = result.job, result.gpu.memory_gib
    again = "layers" if job.checkpointing == "full" else "nothing"
    print(
        f"{path}: {job.shape.name}, {job.title}, {planned.strategy_name} on {planned.cluster}, "
        f"{recipe.training.optim}, micro-batch {job.micro_batch} x accumulation {job.accumulation} x {job.gpus}, "
        f"{job.sequence:,} tokens, recomputes {again}"
    )
    show.trained(job, recipe.model.lora_modules_to_save)
    show.describe(result)
    if trace:
        beside = planned.settings.recipe_path.with_name(BESIDE)
        model = str(beside.parent) if beside.is_file() else recipe.model.model_name_or_path
        show.both(job, show.tracer(model)(job))
    spare = result.spare_gib - margin * whole
    usual = replace(hosts, gpu=result.gpu.kind, node_size=job.node_size, nodes=job.nodes)
    found = "it fits" if spare >= 0 else f"it does not fit: {figure(-spare, 1)} GiB are lacking"
    if refused := trap(job) or lacks_host(job, usual):
        found = f"not to be taken: it {refused}" if "hang" in refused else f"it does not fit: {refused}"
    print(f"verdict  {found}; {result.device_gib:.1f} of {whole:.1f} GiB of each GPU, {margin:.0%} to be left free")
    return 0 if spare >= 0 and not refused else 1
