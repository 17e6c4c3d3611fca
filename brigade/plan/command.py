"""`python -m brigade plan MODEL --hostfile H --gpu KIND`: say what fits, how fast it is, and which strategy to take."""

import argparse
import os
import re
from pathlib import Path
from typing import NoReturn, get_args

from ..errors import UserError, did_you_mean
from ..errors.console import console
from ..errors.flags import add_flags
from ..errors.tables import Fields, table
from ..train.recipe.files import find
from ..train.recipe.hostfile import read_hostfile
from ..train.recipe.method import METHODS
from ..train.recipe.objectives import DISTILL, OBJECTIVES
from ..train.recipe.training_section import TrainingSection
from ..train.strategy import refusal
from .choice import averaging_advice, goals, search
from .choice.workload import INSTALLED, MICRO_BATCHES, WITH_LIGER, Cluster, Workload, named
from .costs.images import Asked, described_with_images, size_of
from .costs.job import PROJECTOR
from .costs.memory import GIB
from .hardware import calibration, gpu
from .hardware.network import hold_name
from .output import answer, show, write
from .output.answer import answer_json
from .output.objective import say_images, say_objective
from .output.show_recipe import show_recipe
from .output.write import refresh
from .runs.calibrate import calibrate
from .shape.find import described, named_config, positions_of, stretches
from .shape.lora import ENDS, trained_parameters

FLAGS = table(Path(__file__).with_suffix(".yaml"))
REFUSED = table(Path(__file__).with_name("refused.yaml"))
MOST_SLOTS = 72


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    model = "a recipe's folder, a folder or file with a config.json, or a name on the Hub; a recipe's .yaml is planned as it is"
    parser.add_argument("model", nargs="?", help=model)
    for title, flags in FLAGS.items():
        add_flags(parser.add_argument_group(title), flags, METHODS=METHODS, OBJECTIVES=OBJECTIVES)


def run(options: argparse.Namespace) -> int:
    """Plan a model or a recipe, calibrate, or refresh headers, as the flags say. Returns the exit code."""
    if options.calibration:
        if not options.calibrate and not options.calibration.is_file():
            _refuse("no calibration", file=str(options.calibration))
        os.environ[calibration.VARIABLE] = str(options.calibration)
    if options.calibrate:
        return _calibrate(options.calibrate)
    if options.check and not options.headers:
        _refuse("check alone")
    if options.headers:
        return _headers(options.check)
    if not options.model:
        example = "python -m brigade plan recipes/qwen3-8b --hostfile hostfiles/2x8 --gpu 'H100 80GB'"
        raise UserError("plan", "no model is named", example)
    return _recipe(options) if options.model.endswith((".yaml", ".yml")) else _choose(options)


def _refuse(name: str, /, **facts: object) -> NoReturn:
    """Raise the UserError of a row of refused.yaml, whose texts name these facts."""
    row = REFUSED[name]
    raise UserError(f"flag --{row['flag']}", row["problem"].format(**facts), row["cure"].format(**facts))


def _calibrate(folders: list[Path]) -> int:
    file = calibration.where()
    if file is None:
        place = f"${calibration.VARIABLE}"
        raise UserError(place, "it is empty: there is no file to keep factors in", "name one: --calibration FILE")
    print(*calibrate(folders, file), sep="\n")
    print(f"Wrote {file}: yours to edit, and to delete. {calibration.VARIABLE} names another, or none.")
    return 0


def _headers(check: bool) -> int:
    changed = refresh(check)
    lines = [f"{path} is out of date" if check else f"Wrote {path}" for path in changed]
    print("\n".join(lines) or "All headers are up to date.")
    return 1 if check and changed else 0


def _recipe(options: argparse.Namespace) -> int:
    """Print the estimate of a recipe, on its own cluster or that of --hostfile and --gpu."""

    for flag, takes in FLAGS["search"].items():
        if getattr(options, flag) not in (takes.get("default"), False):
            problem = f"{options.model} is estimated as it is"
            raise UserError(f"flag --{flag}", problem, "leave it out, or name the model instead")
    hold_name(options.network, "flag --network")
    cluster = {name: getattr(options, name) for name in ("hostfile", "gpu", "sync_every") if getattr(options, name)}
    hosts = Cluster("", 1, 1, options.network, options.host_memory, options.nvme)
    money = options.tokens, options.price
    more: Fields = {"asked": _asked_of_images(options), "as_json": options.json}
    return show_recipe(options.model, cluster, hosts, options.margin, *money, **more)


def _asked_of_images(options: argparse.Namespace) -> Asked:
    return Asked(options.images_per_sample, size_of(options.image_size) if options.image_size else None)


def _choose(options: argparse.Namespace) -> int:
    """Print the strategies side by side, and the one to take."""

    if options.sync_every:
        _refuse("sync_every")
    workload, cluster = asked(options)
    if options.write:  # what it refuses is refused before anything is printed
        write.rope_for(options.model, workload)
    tokens = options.tokens or goals.BILLION
    found, advice = goals.pick(goals.answer(workload, cluster), options.goal, options.deadline, tokens)
    cluster, ranked, winner = found.cluster, found.ranked, found.winner
    if not ranked:
        names = " or ".join(choice.name for choice in workload.choices)
        reasons = (search.impossible(workload, cluster, choice) for choice in workload.choices)
        whys = dict.fromkeys(filter(None, reasons))
        if whys:
            cure = "name ddp, zero2_offload or zero3_offload_param; or give a --hostfile with more slots"
            if cluster.gpus > 1:
                cure = f"name {' or '.join(dict.fromkeys(choice.undivided.key for choice in workload.choices))}"
                cure += ", or leave --strategy out to see what fits"
            _refuse("cannot train", names=names, shape=workload.shape, whys="; ".join(whys), cure=cure)
        _refuse("cannot divide", names=names, shape=workload.shape, cluster=cluster)
    device = ranked[0].estimate.gpu if ranked else None
    advice = [*advice, *averaging_advice.for_model(found)]
    advice += show.warnings(options.model, workload, device) if device else []
    late = bool(winner and options.deadline and found.slow_hours(tokens) > options.deadline)
    if options.json:
        if winner is None:
            advice.append(show.nothing_fits(found))
        print(answer_json(found, advice, options.price))
        return 0 if winner and not late else 1
    if winner is None:
        print(show.wrapped(show.nothing_fits(found)))
        if found.slow and not workload.images:
            named: Fields = {"strategy": [found.slow.choice.key]}
            named |= {"optim": found.slow.estimate.job.optimizer} if found.slow.lighter else {}
            words = answer.command_to_write(options, FLAGS.values(), workload.shape.name, **named)
            show.say_command(f"{'Not written. ' * bool(options.write)}Write it all the same: {words}")
    else:
        _say_first(options, found, late)
    if options.goal or options.deadline:  # of which size it is
        print(*map(show.wrapped, advice[:1]))
        advice = advice[1:]
    show.trained(ranked[0].estimate.job, workload.whole)
    console().print(show.comparison(workload, cluster, ranked, winner))
    if winner is None:
        show.say_all(advice)
        return 1
    show.say_all(show.unfitting(ranked))
    show.batch(winner)
    say_objective(winner.estimate, workload.length)
    say_images(winner.estimate)
    show.describe(winner.estimate, tokens, options.price)
    if not options.liger:
        show.with_liger(workload, cluster, winner)
    if options.write:
        written = write.write(winner, workload, options.model, options.write, options.hostfile)
        print("\n".join(f"Wrote {path}" for path in written) or "The recipe is there already, unchanged.")
    show.say_all(advice)
    show.say_notes(winner.estimate)
    return 1 if late else 0


def _say_first(options: argparse.Namespace, found: goals.Answer, late: bool) -> None:
    """Print whether it fits and what it takes, and the command to go on with."""
    workload, winner = found.workload, found.winner
    assert winner
    wants_hours = options.tokens or options.price is not None or options.deadline
    fits = "Fits, and is slow" if winner.estimate.slow else "Fits"
    fits += f", but is not sure to keep the deadline of {options.deadline:g} h" if late else ""
    takes = show.takes(winner, found.cluster, (options.tokens or goals.BILLION) if wants_hours else None, options.price)
    print(show.wrapped(f"{fits}: {takes}."))
    if options.write:
        recipe = write.recipe_path(options.write, workload.method)
        smaller = write.hosts_file(winner, recipe.parent, options.hostfile)
        show.say_command(answer.command_to_start(recipe, str(smaller.path) if smaller else options.hostfile))
    elif not workload.images:
        try:
            write.rope_for(options.model, workload)
        except UserError as error:
            print(show.wrapped(f"Not written as it is: {error.problem}. To write it, {error.cure}."))
        else:
            show.say_command(f"Write it: {answer.command_to_write(options, FLAGS.values(), workload.shape.name)}")


def asked(options: argparse.Namespace) -> tuple[Workload, Cluster]:
    """Return what to train and where, as the flags say. Raises UserError."""
    cluster = _cluster(options)
    return _workload(options, cluster), cluster


def _cluster(options: argparse.Namespace) -> Cluster:
    hold_name(options.network, "flag --network")
    if not options.gpu:
        _refuse("no gpu")
    if re.match(r"\d+ ?[x*]", options.gpu, re.I) or re.search(r"[a-z0-9]x\d$", options.gpu, re.I):
        _refuse("how many", gpu=options.gpu)
    kinds = [kind.strip() for kind in re.split(r"[,+/&]| and ", options.gpu) if kind.strip()]
    if len(kinds) > 1:
        slowest = min(map(gpu, kinds), key=lambda one: one.bf16_tflops)
        least = min(map(gpu, kinds), key=lambda one: one.memory_gib)
        fits = least.memory_gib >= 0.95 * slowest.memory_gib
        tight = "" if fits else f", with sequences that fit {least.kind} too"
        _refuse("kinds", gpu=options.gpu, many=len(kinds), slowest=slowest.kind, tight=tight)
    hosts = {"this host": 1}
    if options.hostfile:
        hosts = read_hostfile(find(options.hostfile, "flag --hostfile", "hostfile"))
    if options.network and len(hosts) == 1:
        _refuse("one host")
    slots = hosts.values()
    if max(slots) > MOST_SLOTS:
        _refuse("many slots", slots=max(slots), most=MOST_SLOTS)
    more = {"link": options.network, "host_gib": options.host_memory, "nvme_gb": options.nvme}
    return Cluster.of(options.gpu, slots, **more)


def _check_with_images(options: argparse.Namespace) -> None:
    """Raise UserError at the flag that asks for what train.py refuses under every strategy where rows have images."""
    compares = OBJECTIVES[options.objective].compares
    facts = {
        "method": {"method": options.method},
        "objective": {"compares": compares},
        "liger": {"use_liger_kernel": options.liger},
    }
    for flag, fact in facts.items():
        row = refusal(images=True, **fact)
        if row:
            raise UserError(f"flag --{flag}", row["problem"], row["cure"])


def _workload(options: argparse.Namespace, cluster: Cluster) -> Workload:
    """Return what the flags ask for. Raises UserError where they contradict each other, the model or train.py."""

    config, place, name = named_config(options.model)
    method, keys, images = options.method, METHODS[options.method].keys, None
    asked = _asked_of_images(options)
    if asked:
        if options.write:
            _refuse("recipe of images")
        _check_with_images(options)
        shape, images = described_with_images(config, place, name, asked, () if keys else (PROJECTOR,))
    else:
        shape = described(config, place, name)
    if options.objective == DISTILL:
        _refuse("teacher")
    shape = shape.scoring if OBJECTIVES[options.objective].scores else shape
    micro = options.micro_batch or 1
    gpus = cluster.gpus
    least = gpus * micro  # of which a batch is a multiple
    batch = options.global_batch_size or cluster.batch(micro, method)
    whole = options.lora_modules_to_save
    whole = () if whole == "none" else tuple(whole.replace(",", " ").split())
    optims = get_args(TrainingSection.model_fields["optim"].annotation)

    if "load_in_4bit" in keys and shape.experts:
        share = shape.moe_layers * shape.experts * shape.expert / shape.parameters
        size, plain = 2 * shape.parameters / GIB, method[1:]
        whole = goals.answer(_workload(argparse.Namespace(**vars(options) | {"method": plain}), cluster), cluster)
        fits = f"Fits: {show.takes(whole.winner, cluster)}" if whole.winner else show.nothing_fits(whole)
        _refuse("experts in 4 bits", method=method, share=share, other=plain, size=size, fits=fits)
    positions = positions_of(config)
    if positions and options.max_length > positions and not (shape.family.rotary and stretches(config)):
        _refuse("positions", length=options.max_length, positions=positions, shape=shape)
    if options.lora_r and not keys:
        _refuse("rank of nothing")
    if whole and not keys:
        _refuse("whole anyway")
    other = [name for name in whole if name not in ENDS]
    if other:
        _refuse("not counted", other=other[0], ends=", ".join(ENDS))
    if whole and shape.tied:
        _refuse("tied", shape=shape)
    if options.micro_batch and batch % least and batch % gpus == 0:
        _refuse("undivided batch", batch=batch, gpus=gpus, micro=micro, near=-(-batch // least) * least)
    if options.lora_r and options.lora_r > shape.hidden:
        _refuse("no low rank", rank=options.lora_r, shape=shape)
    if options.optim and options.optim not in optims:
        _refuse("optimizer", name=options.optim, near=did_you_mean(options.optim, optims))
    rank = options.lora_r or Workload.rank
    return Workload(
        shape,
        options.max_length,
        batch,
        method,
        trained=trained_parameters(shape, rank, whole, dora="use_dora" in keys) if keys else 0,
        rank=rank,
        whole=whole,
        kernels=WITH_LIGER if options.liger else INSTALLED,
        margin=options.margin,
        choices=named(options.strategy, options.optim or "adamw_torch_fused"),
        asked=bool(options.strategy),
        optimizer=options.optim,
        micro_batches=(micro,) if options.micro_batch else MICRO_BATCHES,
        objective=options.objective,
        images=images,
    )
