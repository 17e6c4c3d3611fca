"""`python -m brigade plan MODEL --hostfile H --gpu KIND`: does it fit, how fast is it, and which strategy is the one."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError, did_you_mean, numeric
from ..errors.console import console
from ..planner.costs import calibration
from ..recipe.method import METHODS

if TYPE_CHECKING:
    from ..planner.choice.job import Method
    from ..planner.choice.search import Cluster, Wanted
    from ..planner.models.shape import ModelShape


# What a recipe says itself, and what becomes of a search: no flags beside a recipe's file.
OF_SEARCH = (
    "method",
    "lora_r",
    "lora_modules_to_save",
    "max_length",
    "global_batch_size",
    "strategy",
    "micro_batch",
    "optim",
    "liger",
    "write",
    "plot",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help="a recipe's folder, a folder or file with a config.json, or a name on the Hub; a recipe's .yaml is planned as it is",
    )
    where = parser.add_argument_group("cluster")
    where.add_argument("--hostfile", help="hosts and slots in DeepSpeed's syntax")
    where.add_argument(
        "--gpu", metavar="KIND", help="H100 80GB, A100 80GB, H200, RTX 4090, ... (a wrong name lists them)"
    )
    where.add_argument(
        "--network",
        default="",
        metavar="NAME",
        help="between nodes: `3200 Gb/s`, `EFA 3200 Gb/s` (default: the GPU kind's usual)",
    )
    where.add_argument(
        "--host_memory",
        type=numeric("host_memory", 1, float),
        default=0.0,
        metavar="GiB",
        help="of a host (default: the GPU kind's usual)",
    )
    where.add_argument(
        "--nvme",
        type=numeric("nvme", 1, float),
        default=0.0,
        metavar="GB",
        help="of a host's local disks (default: the GPU kind's usual)",
    )
    what = parser.add_argument_group("training")
    what.add_argument("--method", choices=METHODS, default="full")
    what.add_argument("--lora_r", type=numeric("lora_r", 1), metavar="R", help="rank of adapters (default: 16)")
    what.add_argument(
        "--lora_modules_to_save",
        default="none",
        metavar="NAMES",
        help="trained whole beside adapters: `embed_tokens,lm_head` (default: none)",
    )
    what.add_argument(
        "--max_length",
        type=numeric("max_length", 1),
        default=4096,
        metavar="TOKENS",
        help="of a sequence, packed full (default: 4096)",
    )
    what.add_argument(
        "--global_batch_size",
        type=numeric("global_batch_size", 1),
        metavar="N",
        help="sequences per step (default: 128 or more that divide over the GPUs)",
    )
    what.add_argument(
        "--strategy",
        nargs="+",
        default=[],
        metavar="NAME",
        help="search among these: ddp, zero1, zero3_hpz, fsdp2, hsdp, ...",
    )
    what.add_argument(
        "--micro_batch",
        type=numeric("micro_batch", 1),
        metavar="N",
        help="sequences per GPU and micro-step (default: the best)",
    )
    what.add_argument(
        "--optim", default="adamw_torch_fused", metavar="NAME", help="as a recipe's optim: adamw_8bit, sgd, ..."
    )
    what.add_argument(
        "--trace", action="store_true", help="activations and logits from a trace of the model's own code"
    )
    what.add_argument(
        "--liger", action="store_true", help="with Liger's kernels, which requirements.txt does not install"
    )
    what.add_argument(
        "--margin",
        type=numeric("margin", 0, float, 1),
        default=0.05,
        metavar="SHARE",
        help="of each GPU to leave free (default: 0.05)",
    )
    own = parser.add_argument_group("your own cluster")
    own.add_argument(
        "--calibrate",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="output directories of runs: fold what they measured into factors for their GPU and network, and stop",
    )
    own.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="where the factors lie, with your own GPU kinds (default: $BRIGADE_CALIBRATION, ~/.config/brigade/calibration.yaml)",
    )
    recipes = parser.add_argument_group("recipes")
    recipes.add_argument(
        "--write", type=Path, metavar="PATH", help="write the chosen strategy as a recipe: a folder, or a .yaml file"
    )
    recipes.add_argument(
        "--headers", action="store_true", help="write the headers of all recipes and recipes/README.md anew"
    )
    recipes.add_argument(
        "--check", action="store_true", help="with --headers: write nothing, exit 1 if one is out of date"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw memory and speed of the strategies into a new FILE.png or FILE.html",
    )


def run(options: argparse.Namespace) -> int:
    if options.calibration:
        if not options.calibrate and not options.calibration.is_file():
            raise UserError(
                "flag --calibration", f"there is no file {str(options.calibration)!r}", "--calibrate RUN ... makes one"
            )
        os.environ[calibration.VARIABLE] = str(options.calibration)
    if options.calibrate:
        return _calibrate(options.calibrate)
    if options.check and not options.headers:
        raise UserError("flag --check", "it says how --headers works", "add --headers")
    if options.headers:
        return _headers(options.check)
    if not options.model:
        example = "python -m brigade plan recipes/qwen3-8b --hostfile hostfiles/2x8 --gpu 'H100 80GB'"
        raise UserError("plan", "no model is named", example)
    if options.model.endswith((".yaml", ".yml")):
        return _recipe(options)
    return _choose(options)


def _calibrate(folders: list[Path]) -> int:
    from ..planner.costs.calibrate import calibrate

    file = calibration.where()
    if file is None:
        raise UserError(
            f"${calibration.VARIABLE}",
            "it is empty: there is no file to keep factors in",
            "name one: --calibration FILE",
        )
    print(*calibrate(folders, file), sep="\n")
    print(f"Wrote {file}: yours to edit, and to delete. {calibration.VARIABLE} names another, or none.")
    return 0


def _headers(check: bool) -> int:
    from ..planner.output.write import refresh

    changed = refresh(check)
    print(
        "\n".join(f"{path} is out of date" if check else f"Wrote {path}" for path in changed)
        or "All headers are up to date."
    )
    return 1 if check and changed else 0


def _recipe(options: argparse.Namespace) -> int:
    """A recipe's own configuration, on its own cluster or that of --hostfile and --gpu."""
    from ..planner.choice.search import Cluster
    from ..planner.costs.network import hold_name
    from ..planner.output.as_it_is import show_recipe

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    if beside := [name for name in OF_SEARCH if getattr(options, name) != parser.get_default(name)]:
        said = f"{options.model} is estimated as it is"
        raise UserError(f"flag --{beside[0]}", said, "leave it out, or name the model instead")
    hold_name(options.network, "flag --network")
    cluster = {name: getattr(options, name) for name in ("hostfile", "gpu") if getattr(options, name)}
    hosts = Cluster("", 1, 1, options.network, options.host_memory, options.nvme)
    return show_recipe(options.model, cluster, hosts, options.trace, options.margin)


def _choose(options: argparse.Namespace) -> int:
    """The strategies side by side, and the one to take."""
    from ..planner.choice import search
    from ..planner.output import show

    cluster = _cluster(options)
    wanted = _wanted(options, cluster.gpus)
    traces = show.tracer(options.model) if options.trace else search.by_formula
    ranked = search.candidates(wanted, cluster, traces)
    if not ranked:
        names = " or ".join(choice.name for choice in wanted.choices)
        raise UserError(
            "flag --strategy",
            f"{names} cannot divide this model over {cluster.nodes} x {cluster.node_size} GPUs "
            f"({wanted.shape.heads} attention heads, {wanted.shape.layers} layers, {wanted.shape.experts} experts)",
            "name another strategy, micro-batch or hostfile",
        )
    if options.plot:
        from ..planner.output import plot

        plot.write(options.plot, wanted, cluster, ranked)
    winner = search.chosen(ranked)
    show.trained(ranked[0].estimate.job, wanted.whole)
    console().print(show.comparison(wanted, cluster, ranked, winner))
    if winner is None:
        change = search.smallest_change(wanted, cluster, traces)
        if all(candidate.choice.only for candidate in ranked):
            print("train.py runs none of these. Leave --strategy out to see what it runs.")
        else:
            print(
                f"Nothing that train.py runs fits. The smallest change that does: {change}."
                if change
                else "Nothing that train.py runs fits, with up to 64 nodes, adapters, fused kernels or shorter sequences either: "
                "take GPUs or hosts with more memory."
            )
        return 1
    show.describe(winner.estimate)
    if options.trace:
        show.both(winner.estimate.job, traces(winner.estimate.job))
    if not options.liger:
        show.with_liger(wanted, cluster, winner)
    if options.write:
        from ..planner.choice.job_of_recipe import source_of
        from ..planner.models.find_model import config_of
        from ..planner.output import write

        found = write.write(
            winner,
            wanted,
            source_of(options.model),
            config_of(options.model),
            options.write,
            _rank(options),
            options.hostfile,
        )
        print("\n".join(f"Wrote {path}" for path in found) or "The recipe is there already, unchanged.")
    return 0


def _cluster(options: argparse.Namespace) -> "Cluster":
    from ..cluster import read_hostfile
    from ..planner.choice.search import Cluster
    from ..planner.costs.network import hold_name
    from ..recipe.files import find

    hold_name(options.network, "flag --network")
    if not options.gpu:
        raise UserError("flag --gpu", "no kind of GPU is named", "for example --gpu 'H100 80GB'")
    hosts = {"this host": 1}
    if options.hostfile:
        hosts = read_hostfile(find(options.hostfile, "flag --hostfile", "hostfile"))
    if options.network and len(hosts) == 1:
        raise UserError(
            "flag --network",
            "nothing goes between hosts where there is one",
            "leave it out, or give a --hostfile of several",
        )
    sizes = sorted(set(hosts.values()))
    if len(sizes) > 1:
        raise UserError(
            options.hostfile, f"its hosts have {' and '.join(map(str, sizes))} slots", "plan for hosts of one size"
        )
    return Cluster(options.gpu, sizes[0], len(hosts), options.network, options.host_memory, options.nvme)


def _rank(options: argparse.Namespace) -> int:
    """Of adapters."""
    if options.lora_r is not None and options.method == "full":
        raise UserError("flag --lora_r", "full fine-tuning has no adapters", "leave it out, or give --method lora")
    return 16 if options.lora_r is None else options.lora_r


def _whole(options: argparse.Namespace, shape: "ModelShape") -> tuple[str, ...]:
    """Modules that are trained whole beside adapters."""
    from ..planner.models.adapter_costs import ENDS

    place, given = "flag --lora_modules_to_save", options.lora_modules_to_save
    names = () if given == "none" else tuple(given.replace(",", " ").split())
    if names and options.method == "full":
        raise UserError(place, "full fine-tuning trains them anyway", "leave it out, or give --method lora")
    if other := [name for name in names if name not in ENDS]:
        raise UserError(place, f"the formulas do not count {other[0]!r}", f"name {', '.join(ENDS)} or none")
    if names and shape.tied:
        raise UserError(
            place, f"{shape.name} ties its two ends: trained apart, they could not be saved as one", "leave it out"
        )
    return names


def _wanted(options: argparse.Namespace, gpus: int) -> "Wanted":
    from typing import get_args

    from ..planner.choice.search import INSTALLED, MICRO_BATCHES, Wanted
    from ..planner.choice.strategies import named
    from ..planner.models.adapter_costs import trained_parameters
    from ..planner.models.find_model import named_shape
    from ..recipe.schema import TrainingSection

    shape = named_shape(options.model)
    micro = 1 if options.micro_batch is None else options.micro_batch
    least = max(1, gpus * micro)  # of which a batch is a multiple
    batch = options.global_batch_size if options.global_batch_size is not None else -(-max(128, least) // least) * least
    four_bits = METHODS[options.method].get("load_in_4bit", False)
    method: Method = "full" if options.method == "full" else "qlora" if four_bits else "lora"
    if method == "qlora" and shape.experts:
        share = shape.moe_layers * shape.experts * shape.expert / shape.parameters
        raise UserError(
            "flag --method",
            f"{options.method} would quantise little: bitsandbytes takes linear layers, and "
            f"{share:.0%} of the weights are experts, which Transformers holds in 3D parameters",
            f"use --method {options.method[1:]}",
        )
    rank, whole = _rank(options), _whole(options, shape)
    trained = (
        trained_parameters(shape, rank, whole, dora=options.method.endswith("dora")) if options.method != "full" else 0
    )
    if options.micro_batch and batch % least and batch % gpus == 0:
        raise UserError(
            "flag --micro_batch",
            f"{batch} sequences do not divide over {gpus} GPUs in micro-batches of {micro}",
            f"use --global_batch_size {-(-batch // least) * least}",
        )
    known = get_args(TrainingSection.model_fields["optim"].annotation)
    if options.optim not in known:
        raise UserError(
            "flag --optim", f"{options.optim!r} is none that train.py runs", did_you_mean(options.optim, known)
        )
    return Wanted(
        shape,
        options.max_length,
        batch,
        method,
        options.method,
        trained,
        kernels=("Liger",) if options.liger else INSTALLED,
        margin=options.margin,
        whole=whole,
        choices=named(options.strategy, options.optim),
        optimizer=options.optim,
        micro_batches=(micro,) if options.micro_batch else MICRO_BATCHES,
    )
