"""How large a recipe's checkpoints are, and how many are kept, as the planner counts them."""

from ..errors import UserError
from ..launch.job import Job


def checkpoint_bytes(job: Job) -> float | None:
    """Of one checkpoint, by planner/costs/host_memory.py: checkpoint(); None for what no formula covers."""
    from ..planner.choice.job_of_recipe import BESIDE
    from ..planner.choice.job_of_run import NotCovered, job_of_run
    from ..planner.costs.host_memory import host
    from ..planner.models.find_model import named_config
    from ..recipe.batch import batch_arithmetic

    settings, recipe = job.settings, job.settings.recipe
    beside = settings.recipe_path.with_name(BESIDE)
    # States are saved in fp32 whatever computes them, so what the formulas do not know of fp32 or tiles does not matter here.
    same = {"bf16": True, "fp16": False, "tiled_mlp": False, "tiled_loss": None, "ddp_comm_hook": "none"}
    if recipe.training.per_device_train_batch_size == "auto":
        same["per_device_train_batch_size"] = 1
    training = recipe.training.model_copy(update=same)
    cluster = recipe.cluster.model_copy(update={"network": None})
    try:
        batch = batch_arithmetic(training, job.strategy.axes.data(job.world_size), settings.place("global_batch_size"))
        config, place, _ = named_config(str(beside.parent) if beside.is_file() else recipe.model.model_name_or_path)
        asked = recipe.model_copy(update={"training": training, "cluster": cluster})
        kind = cluster.gpu or "H100 80GB"
        node = max(job.hosts.values())
        planned = job_of_run(asked, job.strategy, batch, job.world_size, node, config, kind, place=place)
        return host(planned).checkpoint
    except (UserError, NotCovered, KeyError):
        return None


def kept(job: Job) -> int:
    """Checkpoints that lie on the disk at a time at most: save_total_limit, the best one, and the one that is being written. At
    least two where all are kept, as nobody knows how many those will be."""
    training = job.settings.recipe.training
    return (training.save_total_limit or 1) + bool(training.load_best_model_at_end) + 1
