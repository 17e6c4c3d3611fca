"""`python -m brigade plan MODEL --hostfile H --gpu KIND`: does it fit, how fast is it, and which strategy is the one."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..estimate import calibration

if TYPE_CHECKING:
    from rich.table import Table

    from ..estimate.estimate import Estimate
    from ..estimate.job import Job
    from ..estimate.search import Candidate, Cluster, Traces, Wanted
    from ..estimate.trace import Traced


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="a recipe's folder, a folder or file with a config.json, or a name on the Hub"
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
    what = parser.add_argument_group("training")
    what.add_argument("--method", choices=("full", "lora", "qlora"), default="full")
    what.add_argument("--lora_r", type=int, default=16, metavar="R")
    what.add_argument(
        "--max_length", type=int, default=4096, metavar="TOKENS", help="of a sequence, packed full (default: 4096)"
    )
    what.add_argument(
        "--global_batch_size", type=int, metavar="N", help="sequences per step (default: 128, or one per GPU)"
    )
    what.add_argument(
        "--trace", action="store_true", help="activations and logits from a trace of the model's own code"
    )
    own = parser.add_argument_group("your own cluster")
    own.add_argument(
        "--calibrate", nargs="+", type=Path, metavar="RUN",
        help="output directories of runs: fold what they measured into factors for their GPU and network, and stop",
    )  # fmt: skip
    own.add_argument(
        "--calibration", type=Path, metavar="FILE",
        help="where the factors lie, with your own GPU kinds (default: $BRIGADE_CALIBRATION, ~/.config/brigade/calibration.yaml)",
    )  # fmt: skip
    batch = parser.add_argument_group("many configurations")
    batch.add_argument(
        "--table", type=Path, metavar="CSV", help="estimate each row (columns as benchmarks/data/published.csv)"
    )
    batch.add_argument("--out", type=Path, metavar="CSV", help="where --table writes the rows with their estimates")


def run(options: argparse.Namespace) -> int:
    if options.calibration:
        if not options.calibrate and not options.calibration.is_file():
            raise UserError("flag --calibration", f"there is no file {str(options.calibration)!r}",
                            "--calibrate RUN ... makes one")  # fmt: skip
        os.environ[calibration.VARIABLE] = str(options.calibration)
    if options.calibrate:
        return _calibrate(options.calibrate)
    if options.table:
        return _table(options)
    if not options.model:
        example = "python -m brigade plan recipes/qwen3-8b --hostfile hostfiles/2x8 --gpu 'H100 80GB'"
        raise UserError("plan", "no model is named", example)
    return _choose(options)


def _calibrate(folders: list[Path]) -> int:
    from ..estimate.calibrate import calibrate

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


def _table(options: argparse.Namespace) -> int:
    """Estimates for each row of a CSV, and how far they are from what the rows measured."""
    from rich.console import Console
    from rich.table import Table

    from ..estimate.table import predict_file, summary

    if not options.out:
        raise UserError("flag --table", "--out is missing", "say where the estimates go: --out estimates.csv")
    rows = predict_file(options.table, options.out)
    table = Table("set", "rows", "estimated", "memory: rows", "median", "p90", "speed: rows", "median", "p90",
                  "failed, called unfit", "ran, called unfit")  # fmt: skip
    for one in summary(rows):
        cells = [one["set"], one["rows"], one["expressed"]]
        for count, median, p90 in (one["memory"], one["speed"]):
            cells += [count, f"{median:.1f}%" if count else "", f"{p90:.1f}%" if count else ""]
        cells += [f"{one['failed_told']} of {one['failed']}", f"{one['ran_refused']} of {one['ran']}"]
        table.add_row(*map(str, cells))
    Console().print(table)
    print(
        f"Wrote {options.out}. Errors are absolute, predicted against measured; a row without estimate says the reason."
    )
    return 0


def _choose(options: argparse.Namespace) -> int:
    """The strategies side by side, and the one to take."""
    from rich.console import Console

    from ..estimate import search

    cluster = _cluster(options)
    wanted = _wanted(options, cluster.gpus)
    traces = _tracer(options.model) if options.trace else search.by_formula
    ranked = search.candidates(wanted, cluster, traces)
    winner = search.chosen(ranked)
    Console().print(_comparison(wanted, cluster, ranked, winner))
    if winner is None:
        print(f"Nothing fits. The smallest change that does: {search.smallest_change(wanted, cluster, traces)}.")
        return 1
    _describe(winner.estimate)
    if options.trace:
        _both(winner.estimate.job, traces(winner.estimate.job))
    return 0


def _tracer(model: str) -> "Traces":
    """The trace of each configuration of the model, at most one per kind; None for those that no trace can stand for."""
    import functools

    from ..estimate.shape import named_config
    from ..estimate.trace import Asked, Traced, asked, trace

    config = named_config(model)[0]

    @functools.cache
    def one_row(wanted: Asked) -> Traced | None:
        try:
            return trace(config, wanted)
        except UserError:
            if wanted.autocast:  # some models' experts compute in one precision alone
                return None
            raise

    def traces(job: "Job") -> Traced | None:
        wanted = asked(job)
        row = one_row(wanted) if wanted else None
        return row and row.times(job.micro_batch)

    return traces


def _both(job: "Job", found: "Traced | None") -> None:
    """Formula and trace side by side, of a micro-batch."""
    from ..estimate.memory import GIB, activation_bytes, logit_bytes

    if found is None:
        print("trace    this configuration cannot be traced: its activations and logits are by formula")
        return
    kept, back = activation_bytes(job)
    figures = [("kept by layers", kept * job.shape.layers, found.kept), ("beside, backward", back, found.back)]
    figures += [("logits and loss", logit_bytes(job), found.loss)] if job.loss == "released" else []
    print(f"{'trace':9}{'GiB':17}{'formula':>9}{'traced':>9}{'off by':>9}")
    for what, guess, seen in figures:
        off = f"{100 * (guess / seen - 1):+.1f} %" if seen else ""
        print(f"{'':9}{what:17}{guess / GIB:9.2f}{seen / GIB:9.2f}{off:>9}")
    if job.loss == "fused":
        print(f"{'':9}logits and loss: by formula; Liger's fused loss is a Triton kernel that no trace runs")


def _comparison(wanted: "Wanted", cluster: "Cluster", ranked: "list[Candidate]", winner: "Candidate | None") -> "Table":
    """The best ten, and why each is not the one."""
    from rich.table import Table

    from ..estimate.search import reason

    shape, device = wanted.shape, ranked[0].estimate.gpu
    title = (f"{shape.name}: {shape.parameters / 1e9:.2f} B parameters, {wanted.method}, {wanted.batch} x {wanted.length:,} "
             f"tokens a step, {cluster.nodes} x {cluster.node_size} {device.kind}")  # fmt: skip
    table = Table("strategy", "micro-batch", "recomputes", "kernels", f"of {device.memory_gib:.0f} GiB", "tokens/s/GPU",
                  "MFU", "why", title=title)  # fmt: skip
    for candidate in ranked[:10]:
        result, style = candidate.estimate, "bold green" if candidate is winner else "" if candidate.fits else "dim"
        again = "layers" if result.job.checkpointing == "full" else "nothing"
        speed = (f"{result.tokens_per_second_per_gpu:,.0f}", f"{result.mfu:.0f}%") if candidate.fits else ("", "")
        table.add_row(candidate.choice.name, str(result.job.micro_batch), again, candidate.kernels,
                      f"{result.device_gib:.0f}", *speed, reason(candidate, winner), style=style)  # fmt: skip
    return table


def _describe(result: "Estimate") -> None:
    """One configuration in parts."""
    from ..estimate.memory import GIB

    def parts(of: object, unit: float, least: float) -> str:
        values = {name: getattr(of, name) / unit for name in of.__dataclass_fields__}  # type: ignore[attr-defined]
        return ", ".join(f"{name} {value:.2f}" for name, value in values.items() if value >= least)

    low, high = result.memory_interval()
    fast, slow = result.time_interval()
    print(f"memory   {result.device_gib:.1f} GiB on each GPU: {parts(result.memory, GIB, 0.05)}, context "
          f"{result.context / GIB:.1f}. In four runs of five torch allocates {low:.1f} to {high:.1f} GiB")  # fmt: skip
    print(f"time     {result.time.total:.2f} s per step, {fast:.2f} to {slow:.2f} in four runs of five: "
          f"{parts(result.time, 1, 0.005)}")  # fmt: skip
    factors = calibration.factors(result.gpu.kind)
    if factors:
        said = ", ".join(f"{name} {factor}" for name, factor in factors.items())
        print(f"measured on your {result.gpu.kind}, and counted in: {said} ({calibration.where()})")
    days = 1e9 / (result.tokens_per_second_per_gpu * result.job.gpus) / 86400
    print(f"duration a billion tokens take {days:.2f} days, {24 * days * result.job.gpus:,.0f} GPU-hours")


def _cluster(options: argparse.Namespace) -> "Cluster":
    from ..cluster import read_hostfile
    from ..estimate.search import Cluster
    from ..recipe import find

    if not options.gpu:
        raise UserError("flag --gpu", "no kind of GPU is named", "for example --gpu 'H100 80GB'")
    if not options.hostfile:
        return Cluster(options.gpu, 1, 1, options.network)
    hosts = read_hostfile(find(options.hostfile, "flag --hostfile", "hostfile"))
    sizes = sorted(set(hosts.values()))
    if len(sizes) > 1:
        raise UserError(options.hostfile, f"its hosts have {' and '.join(map(str, sizes))} slots",
                        "plan for hosts of one size")  # fmt: skip
    return Cluster(options.gpu, sizes[0], len(hosts), options.network)


def _wanted(options: argparse.Namespace, gpus: int) -> "Wanted":
    from ..estimate.search import Wanted
    from ..estimate.shape import lora_parameters, named_shape

    shape = named_shape(options.model)
    batch = options.global_batch_size if options.global_batch_size is not None else max(128, gpus)
    sizes = {"max_length": options.max_length, "lora_r": options.lora_r, "global_batch_size": batch}
    for flag, size in sizes.items():
        if size < 1:
            raise UserError(f"flag --{flag}", f"{size} is not a whole number above 0", "give at least 1")
    trained = lora_parameters(shape, options.lora_r) if options.method != "full" else 0
    return Wanted(shape, options.max_length, batch, options.method, trained)
