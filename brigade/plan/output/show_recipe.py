"""What `plan recipes/NAME/full.yaml` prints: a recipe, its estimate, and how to start it; the comment at its head."""

import shlex
from collections.abc import Mapping
from dataclasses import replace

from ...errors import UserError
from ...errors.console import counted, figure, one_line
from ...errors.tables import Fields
from ...train.model.config_json import read_config
from ...train.model.location import check_length
from ...train.model.rope import positions_by
from ...train.recipe import flags
from ...train.recipe.method import method_of
from ...train.recipe.objectives import SFT
from ..choice import averaging_advice, goals
from ..choice.goals import BILLION, million, own_tokens
from ..choice.job_of_recipe import BESIDE, RecipePlan, here
from ..choice.search import refusal
from ..choice.workload import Cluster
from ..costs.division import first_stage_states
from ..costs.images import NOT_ASKED, Asked
from ..costs.memory import GIB
from ..shape.find import positions_of
from .answer import needed, recipe_json, speed_and_price
from .objective import WORDS, say_images, say_objective
from .show import describe, of_layers, recomputes, say, say_all, say_command, say_notes, trained, wrapped


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
    images, own = result.job.images, own_tokens(plan.settings.recipe)
    hours = figure(result.hours(own or BILLION), 2)
    data = f"its {million(own)} tokens" if own else "a billion tokens"  # where nobody has counted its data
    learns = WORDS["rows"][result.job.comparison.rows]["learns_from"] + (" with images" if images else "")
    lines = [
        f"{model.name}, {result.job.title}{base} on {learns}, {place}.",
        f"Start:    {commands(plan)[0]}",
        f"Expected: {result.device_gib:.1f} of {result.gpu.memory_gib:.1f} GiB on each GPU, {result.time.total:.2f} s per step, "
        f"{result.tokens_per_second_per_gpu:,.0f} tokens/s on each GPU, {hours} hours for {data}.",
        f"          The planner's estimates, not measured. All of them: python -m brigade plan {shlex.quote(plan.path)}",
    ]
    if images:
        size = f"{images.width:,} x {images.height:,} pixels ({images.each.tokens:,} tokens)"
        mean = f"{images.per_sample:g} of {size} in {result.job.sequence:,} tokens"
        lines.append(f"Images:   {mean}, measured on no GPU. Others: --images-per-sample, --image-size")
    lines += [f"Access:   accept {model.licence} on the model's page, and set HF_TOKEN."] if model.licence else []
    return "".join(f"# {one_line(line)}\n" for line in lines)


def replaced(text: str, comment: str) -> str:
    """Return a recipe's text with this header instead of its own."""
    lines = text.splitlines(keepends=True)
    first = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return comment + "".join(lines[first:])


def show_recipe(
    path: str,
    cluster: Mapping[str, object],
    hosts: Cluster,
    margin: float,
    tokens: float | None = None,
    price: float | None = None,
    as_json: bool = False,
    asked: Asked = NOT_ASKED,
) -> int:
    """Print the estimate of the recipe at `path`; return 1 if it does not fit with a share of `margin` left free, else 0.

    tokens: to train on, None for what its max_steps take, else a billion; price: US dollars for an hour of a GPU
    asked: what flags say of its images
    cluster: hostfile and gpu in place of the recipe's own; hosts: network, memory and disks, where they are not the usual ones
    """
    words = [word for key, value in cluster.items() for word in (f"--{key}", str(value))]
    plan = RecipePlan(flags.load(["--recipe", path, *words], loads_model=False), hosts.link, asked=asked)
    result, recipe = plan.estimate, plan.settings.recipe
    if recipe.training.bf16 and not result.gpu.bf16:
        raise UserError(plan.settings.place("bf16"), f"the {result.gpu.kind} has no bf16", "use fp16")
    beside = plan.settings.recipe_path.with_name(BESIDE)
    if beside.is_file():  # else train.py looks at the model's
        check_length(plan.settings, positions_by(recipe.model.rope_parameters, positions_of(read_config(beside))))
    job, whole = result.job, result.gpu.memory_gib
    spare = result.spare_gib - margin * whole
    usual = replace(hosts, gpu=result.gpu.kind, node_size=job.node_size, nodes=job.nodes)
    refused = refusal(job, usual, result.gpu)
    if refused:
        verdict = f"it does not fit: {refused}"
    elif spare < 0:
        verdict = f"it does not fit: {figure(-spare, 1)} GiB are lacking"
    elif not result.fits:
        verdict = f"it may not fit: up to {result.most_gib:.1f} GiB, of which {whole:.1f} are there"
    else:
        slow = ", and is slow," if result.slow else ""
        verdict = f"it fits{slow} with {result.spare_gib:.1f} GiB ({result.spare_gib / whole:.0%}) to spare"
    good = spare >= 0 and result.fits and not refused
    advice = averaging_advice.for_recipe(plan)
    if as_json:
        said: Fields = {"strategy": plan.strategy_name, "reason": verdict, "fits": good}
        print(recipe_json(result, said, advice, price))
        return 0 if good else 1
    training = recipe.training
    own = float(training.max_steps * job.tokens_per_step) if training.max_steps > 0 else None
    data = own_tokens(recipe)
    planned = tokens or own or data or goals.BILLION
    wants_hours = tokens is not None or price is not None
    first = f"{verdict[3].upper()}{verdict[4:]}; {plan.strategy_name} on {plan.cluster}, {needed(result)}"
    if good:
        first += f", {speed_and_price(result, planned if wants_hours else None, price)}"
    print(wrapped(f"{first}. A margin of {margin:.0%} is to be left free."))
    if good or not (refused or spare < 0) or job.images:
        say_command(f"Start: {commands(plan)[0]}")
    else:
        say_command(f"Plan what fits: {_command_to_choose(plan, hosts)}")
    trained(job, recipe.model.lora_modules_to_save, len(set(recipe.model.trainable_token_indices)))
    print(
        f"{path}: {job.shape.name}, {job.title}, {plan.strategy_name} on {plan.cluster}, {recipe.training.optim}, "
        f"{lengths(plan)} tokens, recomputes {recomputes(job)}"
    )
    describe_recipe(plan)
    say_objective(result, recipe.data.max_length)
    say_images(result)
    describe(result, planned, price)
    if tokens is None:
        steps = f"its {training.max_steps:,} steps are {own or 0:,.0f} tokens"
        counts = f"`python -m brigade prepare {shlex.quote(plan.path)}` counts its own data, and --tokens plans for it"
        about = f"about as many as {recipe.data.dataset_name} has; " if data else ""
        say("", steps if own else about + counts)
    say_all(advice)
    say_notes(result)
    return 0 if good else 1


def _command_to_choose(plan: RecipePlan, hosts: Cluster) -> str:
    """Return the command that plans the recipe's model on the same hosts by whatever fits there."""
    recipe, job = plan.settings.recipe, plan.estimate.job
    beside = plan.settings.recipe_path.with_name(BESIDE)
    flags_of: Fields = {
        "hostfile": recipe.cluster.hostfile,
        "gpu": plan.estimate.gpu.kind,
        "network": job.link if job.nodes > 1 else None,
        "method": method_of(recipe.model),
        "objective": recipe.training.objective,
        "max_length": recipe.data.max_length,
        "host_memory": f"{hosts.host_gib:g}" if hosts.host_gib else None,
        "nvme": f"{hosts.nvme_gb:g}" if hosts.nvme_gb else None,
    }
    model = here(beside.parent) if beside.is_file() else recipe.model.model_name_or_path
    words = [model]
    for flag, value in flags_of.items():
        words += [] if value in (None, "full", SFT) else [f"--{flag}", str(value)]
    return f"python -m brigade plan {shlex.join(words)}"


def describe_recipe(plan: RecipePlan) -> None:
    """Print a recipe's model, hardware and batch, and the commands that start it."""
    job, device, model, recipe = plan.estimate.job, plan.estimate.gpu, plan.model, plan.settings.recipe
    revision = f" at revision {recipe.model.revision}" if recipe.model.revision else ""
    published = " (the published number)" if model.published else ""
    if model.beside:
        published = f" (published are {model.parameters:,}, with {model.beside})"
    beside = f", {job.trained:,} trained beside them" if job.trained else ""
    states = f"{first_stage_states(job)[0].total / GIB:.1f} GiB of model states on each GPU"
    say("model", f"{model.hub}{revision}: {job.shape.parameters:,} parameters{published}{beside}, {states}")
    if model.config:
        say("", f"{BESIDE} beside the recipe: {WORDS['config'][model.config]}")
    if model.licence:
        say("", f"gated: accept {model.licence} on its page and set HF_TOKEN")
    if job.shape.experts and job.method == "lora":
        say("", "experts are no linear layers and stay as they are: adapters lie on the others (docs/methods.md)")
    for said in of_layers(job.shape):
        say("", said)
    if job.shape.family.sinks:
        say("", "its published experts are in MXFP4; they are loaded in bf16, as which they are counted here")
    each = f"{device.memory_gib:.0f} GiB"
    if job.gpus > 1:
        each += f" each, {device.peer_gb_s:.0f} GB/s between two of a host"
    say("hardware", f"{plan.cluster}: {each}")
    shares, axes = job.data * job.replicas.count, plan.strategy.axes
    size = job.micro_batch * job.accumulation * shares
    unpacked = WORDS["rows"][job.comparison.rows]["sequences"]
    what = f"packs of {job.sequence:,} tokens" if recipe.data.packing else unpacked
    over = counted(shares, "data-parallel rank" if axes else "GPU")
    ways = [f"micro-batch {job.micro_batch} x accumulation {job.accumulation} x {over}"]
    if not (recipe.cluster.hostfile or axes) and divides(plan, 8):
        ways.append(f"{job.micro_batch} x {size // job.micro_batch // 8} x 8 GPUs")
    say("batch", " = ".join([f"{size} {what}", *ways]))
    filler = size - recipe.training.global_batch_size
    if filler:
        wasted = f"{filler / size:.1%} of the work is wasted"
        say("", f"{filler} of them filler, for the recipe's {size - filler} do not divide: {wasted}")
    rehearsal = f"python train.py --recipe {shlex.quote(plan.path)} --rehearse  # tiny shapes, any machine"
    rehearses = [] if job.images else [rehearsal]  # which refuses images
    for number, command in enumerate([*commands(plan), *rehearses]):
        say("" if number else "start", command)
