"""What `plan` prints: strategies side by side, one configuration in parts, formula beside trace."""

from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import UserError
from ...errors.console import figure
from ..costs import calibration

if TYPE_CHECKING:
    from collections.abc import Collection

    from rich.table import Table

    from ..choice.estimate import Estimate
    from ..choice.job import Job
    from ..choice.search import Candidate, Cluster, Traces, Workload
    from ..models.traced_activations import Traced


def tracer(model: str) -> "Traces":
    """The trace of each configuration of the model, at most one per kind; None for those that no trace can stand for."""
    import functools

    from ..costs.trace import asked, trace
    from ..models.find_model import named_config
    from ..models.traced_activations import Asked, Traced

    config = named_config(model)[0]

    @functools.cache
    def one_row(question: Asked) -> Traced | None:
        try:
            return trace(config, question)
        except UserError:
            if question.autocast:  # some models' experts compute in one precision alone
                return None
            raise

    def traces(job: "Job") -> Traced | None:
        question = asked(job)
        row = one_row(question) if question else None
        return row and row.times(job.micro_batch)

    return traces


def both(job: "Job", found: "Traced | None") -> None:
    """Formula and trace side by side, of a micro-batch."""
    from ..costs.memory import GIB, activation_bytes, adapters_keep, logit_bytes

    if found is None:
        print("trace    this configuration cannot be traced: its activations and logits are by formula")
        return
    kept, back = activation_bytes(job)
    more, again = adapters_keep(job), job.checkpointing == "full"  # which no trace has
    figures = [
        ("kept by layers", kept * job.shape.layers, found.kept + more * job.shape.layers * (not again)),
        ("beside, backward", back, found.back + more * again),
    ]
    figures += [("logits and loss", logit_bytes(job), found.loss)] if job.loss == "released" else []
    print(f"{'trace':9}{'GiB':17}{'formula':>9}{'traced':>9}{'off by':>9}")
    for what, guess, seen in figures:
        off = f"{100 * (guess / seen - 1):+.1f} %" if seen else ""
        print(f"{'':9}{what:17}{guess / GIB:9.2f}{seen / GIB:9.2f}{off:>9}")
    if job.loss != "released":
        what = (
            "Liger's fused loss is a Triton kernel"
            if job.loss == "fused"
            else "a compiled loss is a program of its own"
        )
        print(f"{'':9}logits and loss: by formula; {what} that no trace runs")


def with_liger(workload: "Workload", cluster: "Cluster", winner: "Candidate") -> None:
    """What fused kernels would bring, which need a package that requirements.txt leaves out."""
    from ..choice import search

    other = search.chosen(search.candidates(replace(workload, kernels=("Liger",)), cluster))
    if other and winner.seconds > 1.01 * other.seconds:
        speed, gain = other.estimate.tokens_per_second_per_gpu, winner.seconds / other.seconds - 1
        print(
            f"liger    with liger-kernel installed and use_liger_kernel: {other.choice.name}, micro-batch "
            f"{other.estimate.job.micro_batch}, {speed:,.0f} tokens/s/GPU ({gain:+.0%}); --liger plans with it"
        )


def nothing_fits(workload: "Workload", cluster: "Cluster", ranked: "list[Candidate]", traces: "Traces") -> str:
    """What to do then."""
    from ..choice.search import smallest_change

    if all(candidate.choice.only for candidate in ranked):
        return "train.py runs none of these. Leave --strategy out to see what it runs."
    if change := smallest_change(workload, cluster, traces):
        return f"Nothing that train.py runs fits. The smallest change that does: {change}."
    return (
        "Nothing that train.py runs fits, with up to 64 nodes, adapters, fused kernels or shorter sequences either: "
        "take GPUs or hosts with more memory."
    )


def comparison(
    workload: "Workload", cluster: "Cluster", ranked: "list[Candidate]", winner: "Candidate | None"
) -> "Table":
    """The best ten, and why each is not the one."""
    from rich.table import Table

    from ...errors.console import billions
    from ..choice.search import reason

    shape, device = workload.shape, ranked[0].estimate.gpu
    title = (
        f"{shape.name}: {billions(shape.parameters)} parameters, {workload.method}, "
        f"{workload.batch} x {workload.length:,} "
        f"tokens a step, {cluster.nodes} x {cluster.node_size} {device.kind}"
    )
    # 6 N FLOPs per token are those of full fine-tuning: adapters' share of them says nothing.
    utilisation = ["MFU"] if workload.method == "full" else []
    table = Table(
        "strategy",
        "micro-batch",
        "recomputes",
        "kernels",
        f"of {device.memory_gib:.0f} GiB",
        "tokens/s/GPU",
        *utilisation,
        "why",
        title=title,
    )
    for candidate in ranked[:10]:
        result, style = candidate.estimate, "bold green" if candidate is winner else "" if candidate.fits else "dim"
        again = "layers" if result.job.checkpointing == "full" else "nothing"
        speed = [f"{result.tokens_per_second_per_gpu:,.0f}", f"{result.mfu:.0f}%"] if candidate.fits else ["", ""]
        table.add_row(
            candidate.choice.name,
            str(result.job.micro_batch),
            again,
            candidate.kernels,
            f"{result.device_gib:.0f}",
            *speed[: 1 + len(utilisation)],
            reason(candidate, winner),
            style=style,
        )
    return table


def trained(job: "Job", whole: "Collection[str]") -> None:
    """Of adapters, and what is trained whole beside them."""
    from ...model.adapters import trains

    if job.trained:
        beside = len(whole) * job.shape.vocab * job.shape.hidden
        print(trains(job.trained - beside, beside, list(whole)))


def describe(result: "Estimate") -> None:
    """One configuration in parts."""
    from ..choice.estimate import parts
    from ..costs.host_memory import gigabytes, host
    from ..costs.memory import GIB
    from ..costs.network import links

    low, high = result.memory_interval()
    fast, slow = result.time_interval()
    loose = result.device_gib - result.allocated_gib - result.context / GIB
    print(
        f"memory   {result.device_gib:.1f} GiB on each GPU: {parts(result.memory, GIB, 0.05)}, allocator {loose:.2f}, context "
        f"{result.context / GIB:.2f}. Torch allocates {result.allocated_gib:.1f} GiB, {low:.1f} to {high:.1f} in four runs "
        "of five"
    )
    if not result.safe:
        print(
            "         at the upper end it does not fit: try it on one host first, or shorter sequences or fewer per GPU"
        )
    needs = host(result.job)
    least, most = (size / GIB for size in needs.fullest)
    print(
        f"host     {needs.loading / GIB:,.0f} GiB of memory on each while loading, {needs.training / GIB:,.0f} while training; "
        f"the larger is {least:,.0f} to {most:,.0f} in four runs of five"
        + (f"; {needs.swapped / 1e9:,.0f} GB of local disk on each" if needs.swapped else "")
    )
    print(f"disk     {gigabytes(needs.checkpoint)} for a checkpoint")
    took, fast_, slow_ = (figure(value, 2) for value in (result.time.total, fast, slow))
    print(f"time     {took} s per step, {fast_} to {slow_} in four runs of five: {parts(result.time, 1, 0.005)}")
    if result.job.nodes > 1:
        rate = f"{links(result.gpu, result.job.link, result.job.node_size).gbit:,.0f} Gbit/s"
        print(
            f"network  {rate} between nodes"
            + ("" if result.job.link else ", as is usual for that GPU: --network says another")
        )
    factors = calibration.factors(result.gpu.kind)
    if factors:
        said = ", ".join(f"{name} {factor}" for name, factor in factors.items())
        print(f"measured on your {result.gpu.kind}, and counted in: {said} ({calibration.where()})")
    least, most = fast / result.time.total, slow / result.time.total
    speed, hours = result.tokens_per_second_per_gpu, 24 * result.days * result.job.gpus
    used = (
        f"; MFU {result.mfu:.0f} %, {result.mfu / most:.0f} to {result.mfu / least:.0f}"
        if result.job.method == "full"
        else ""
    )
    print(f"speed    {speed:,.0f} tokens/s on each GPU, {speed / most:,.0f} to {speed / least:,.0f}{used}")
    days, spent = (
        [figure(factor * value, digits) for factor in (1, least, most)]
        for value, digits in ((result.days, 2), (hours, 0))
    )
    print(
        f"duration a billion tokens take {days[0]} days, {' to '.join(days[1:])}; {spent[0]} GPU-hours, {' to '.join(spent[1:])}"
    )
