"""`python -m brigade plan MODEL --hostfile H --gpu KIND`: does it fit, how fast is it, and which strategy is the one."""

import argparse
from pathlib import Path

from ..errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a recipe's folder, a folder or file with a config.json, or a name on the Hub")
    where = parser.add_argument_group("cluster")
    where.add_argument("--hostfile", help="hosts and slots in DeepSpeed's syntax")
    where.add_argument("--gpu", metavar="KIND", help="H100 80GB, A100 80GB, H200, RTX 4090, ... (a wrong name lists them)")
    where.add_argument("--network", default="", metavar="NAME", help="between nodes: `3200 Gb/s`, `EFA 3200 Gb/s` (default: the GPU kind's usual)")
    what = parser.add_argument_group("training")
    what.add_argument("--method", choices=("full", "lora", "qlora"), default="full")
    what.add_argument("--lora_r", type=int, default=16, metavar="R")
    what.add_argument("--max_length", type=int, default=4096, metavar="TOKENS", help="of a sequence, packed full (default: 4096)")
    what.add_argument("--global_batch_size", type=int, metavar="N", help="sequences per step (default: 128, or one per GPU)")
    batch = parser.add_argument_group("many configurations")
    batch.add_argument("--table", type=Path, metavar="CSV", help="estimate each row (columns as benchmarks/data/published.csv)")
    batch.add_argument("--out", type=Path, metavar="CSV", help="where --table writes the rows with their estimates")


def run(options: argparse.Namespace) -> int:
    if options.table:
        return _table(options)
    if not options.model:
        raise UserError("plan", "no model is named", "python -m brigade plan recipes/qwen3-8b --hostfile hostfiles/2x8 --gpu 'H100 80GB'")
    return _choose(options)


def _table(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from ..estimate.table import predict_file, summary

    if not options.out:
        raise UserError("flag --table", "--out is missing", "say where the estimates go: --out estimates.csv")
    rows = predict_file(options.table, options.out)
    table = Table("set", "rows", "told", "memory: rows", "median", "p90", "speed: rows", "median", "p90", "did not fit, told so", "ran, called unfit")
    for one in summary(rows):
        figures = [f"{value:.1f}%" if count else "" for count, *both in (one["memory"], one["speed"]) for value in both]
        table.add_row(one["set"], str(one["rows"]), str(one["expressed"]), str(one["memory"][0]), *figures[:2], str(one["speed"][0]), *figures[2:],
                      f"{one['failed_told']} of {one['failed']}", f"{one['ran_refused']} of {one['ran']}")  # fmt: skip
    Console().print(table)
    print(f"Wrote {options.out}: errors are of absolute values, predicted against measured; a row without estimate has a reason.")
    return 0


def _choose(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from ..cluster import read_hostfile
    from ..estimate import search
    from ..estimate.memory import GIB
    from ..recipe import find

    if not options.gpu:
        raise UserError("flag --gpu", "no kind of GPU is named", "for example --gpu 'H100 80GB'")
    hosts = read_hostfile(find(options.hostfile, "flag --hostfile", "hostfile")) if options.hostfile else {"this host": 1}
    sizes = set(hosts.values())
    if len(sizes) > 1:
        raise UserError(options.hostfile, f"its hosts have {sorted(sizes)} slots", "plan for hosts of one size")
    cluster = search.Cluster(options.gpu, sizes.pop(), len(hosts), options.network)
    wanted = _wanted(options, cluster.gpus)
    ranked = search.candidates(wanted, cluster)
    winner = search.chosen(ranked)
    shape = wanted.shape
    table = Table("strategy", "micro-batch", "recomputes", "kernels", "GiB of " f"{ranked[0].estimate.gpu.memory_gib:.0f}", "tokens/s/GPU", "MFU", "why",
                  title=f"{shape.name}: {shape.parameters / 1e9:.2f} B parameters, {wanted.method}, {wanted.batch} x {wanted.length:,} tokens a step, "
                        f"{cluster.nodes} x {cluster.node_size} {ranked[0].estimate.gpu.kind}")  # fmt: skip
    for candidate in ranked[:10]:
        result = candidate.estimate
        speed = (f"{result.tokens_per_second_per_gpu:,.0f}", f"{result.mfu:.0f}%") if candidate.fits else ("", "")
        table.add_row(candidate.choice.name, str(result.job.micro_batch), "layers" if result.job.checkpointing == "full" else "nothing",
                      candidate.kernels, f"{result.device_gib:.0f}", *speed, search.reason(candidate, winner),
                      style="bold green" if candidate is winner else "" if candidate.fits else "dim")  # fmt: skip
    console = Console()
    console.print(table)
    if winner is None:
        print(f"Nothing fits. The smallest change that does: {search.smallest_change(wanted, cluster)}.")
        return 1
    _describe(winner, GIB)
    return 0


def _describe(winner, gib: float) -> None:
    """The chosen configuration in parts."""
    result = winner.estimate
    memory = ", ".join(f"{name} {getattr(result.memory, name) / gib:.1f}" for name in result.memory.__dataclass_fields__)
    seconds = ", ".join(f"{name} {getattr(result.time, name):.2f}" for name in result.time.__dataclass_fields__ if getattr(result.time, name) > 0.005)
    low, high = result.memory_interval()
    fast, slow = result.time_interval()
    print(f"memory  {result.device_gib:.1f} GiB per GPU: {memory}, context {result.context / gib:.1f}; "
          f"torch allocates {low:.1f} to {high:.1f} GiB in four runs of five")  # fmt: skip
    print(f"time    {result.time.total:.2f} s per step, {fast:.2f} to {slow:.2f} in four runs of five: {seconds}")
    days = 1e9 / (result.tokens_per_second_per_gpu * result.job.gpus) / 86400
    print(f"a billion tokens take {days:.2f} days, {24 * days * result.job.gpus:,.0f} GPU-hours")


def _wanted(options: argparse.Namespace, gpus: int):
    """What to train, from the flags."""
    from ..estimate.search import Wanted
    from ..estimate.shape import lora_parameters, named_shape

    shape = named_shape(options.model)
    for flag in ("max_length", "lora_r"):
        if getattr(options, flag) < 1:
            raise UserError(f"flag --{flag}", f"{getattr(options, flag)} is not a whole number above 0", "give at least 1")
    batch = options.global_batch_size if options.global_batch_size is not None else max(128, gpus)
    if batch < 1:
        raise UserError("flag --global_batch_size", f"{batch} is not a whole number above 0", "give at least 1")
    trained = lora_parameters(shape, options.lora_r) if options.method != "full" else 0
    return Wanted(shape, options.max_length, batch, options.method, trained)
