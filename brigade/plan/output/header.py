"""Write the comment at the head of a recipe: model, hardware, how to start it, and what the planner expects."""

import shlex

from ...errors.console import figure, one_line
from ...train.recipe.objectives import ANSWERS, JUDGED, PAIRS
from ..choice.goals import BILLION, million, own_tokens
from ..choice.job_of_recipe import RecipePlan

# By what an objective reads: what a recipe's model learns from, and what its sequences are where they are not packed.
LEARNS_FROM = {ANSWERS: "chats", PAIRS: "pairs of answers", JUDGED: "judged answers"}
SEQUENCES = {ANSWERS: "sequences", PAIRS: "pairs", JUDGED: "answers"}


def commands(plan: RecipePlan) -> list[str]:
    """Return the commands that start the recipe on its own cluster, the usual one first; with one GPU also one for eight."""
    recipe, named = shlex.quote(plan.path), plan.settings.recipe.cluster.hostfile
    gpus, hosts = plan.estimate.job.gpus, plan.estimate.job.nodes
    eight = f"torchrun --master_port 29500 --nproc_per_node 8 train.py --recipe {recipe}"
    if not named:
        return [f"python train.py --recipe {recipe}", *([eight] if divides(plan, 8) else [])]
    hostfile = shlex.quote(named)
    lines = [f"python -m brigade launch {recipe} --hostfile {hostfile}"]
    if plan.strategy.is_deepspeed:
        lines.append(f"deepspeed --hostfile {hostfile} train.py --recipe {recipe}")
    elif hosts == 1:
        lines.append(f"torchrun --master_port 29500 --nproc_per_node {gpus} train.py --recipe {recipe}")
    return lines


def divides(plan: RecipePlan, ranks: int) -> bool:
    """Return whether the global batch divides over as many ranks."""
    return plan.settings.recipe.training.global_batch_size % (plan.estimate.job.micro_batch * ranks) == 0


def lengths(plan: RecipePlan) -> str:
    """Return the tokens of a sequence: `4,096`, or of a pair `2 x 2,048`."""
    samples, length = plan.estimate.job.comparison.asks_for.samples, plan.settings.recipe.data.max_length
    return f"{samples} x {length:,}" if samples > 1 else f"{length:,}"


def header(plan: RecipePlan) -> str:
    """Return the comment, of at most eight lines; `plan RECIPE` prints the rest."""
    result, model = plan.estimate, plan.model
    base = " of the base model" if model.base else ""
    place = f"{plan.strategy_name} on {plan.cluster}" if result.job.gpus > 1 else f"on {plan.cluster}"
    images = result.job.images
    learns = LEARNS_FROM[result.job.comparison.rows] + (" with images" if images else "")
    lines = [
        f"{model.name}, {result.job.title}{base} on {learns}, {place}.",
        f"Start:    {commands(plan)[0]}",
        f"Expected: {result.device_gib:.1f} of {result.gpu.memory_gib:.1f} GiB on each GPU, {result.time.total:.2f} s per step, "
        f"{result.tokens_per_second_per_gpu:,.0f} tokens/s on each GPU, {_duration(plan)}.",
        f"          The planner's estimates, not measured. All of them: python -m brigade plan {shlex.quote(plan.path)}",
    ]
    if images:
        size = f"{images.width:,} x {images.height:,} pixels ({images.each.tokens:,} tokens)"
        lines.append(
            f"Images:   {images.per_sample:g} of {size} in {result.job.sequence:,} tokens, measured on no GPU. "
            "Others: --images-per-sample, --image-size"
        )
    lines += [f"Access:   accept {model.licence} on the model's page, and set HF_TOKEN."] if model.licence else []
    return "".join(f"# {one_line(line)}\n" for line in lines)


def _duration(plan: RecipePlan) -> str:
    """Return how long the recipe's own data take, or a billion tokens where nobody has counted those."""
    own = own_tokens(plan.settings.recipe)
    hours = figure(plan.estimate.hours(own or BILLION), 2)
    return f"{hours} hours for " + (f"its {million(own)} tokens" if own else "a billion tokens")


def replaced(text: str, comment: str) -> str:
    """Return a recipe's text with this header instead of its own."""
    lines = text.splitlines(keepends=True)
    first = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return comment + "".join(lines[first:])
