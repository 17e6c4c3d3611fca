"""Print a plan: strategies side by side, one configuration in parts."""

import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from rich.table import Table

from ...errors.console import billions, counted, has_width
from ...train.model.adapters import trains
from ...train.recipe.objectives import SFT
from ..choice import averaging_advice, explain, goals, search
from ..choice.workload import UNPROVEN, WITH_LIGER, Candidate, Cluster, Workload
from ..costs.division import division
from ..costs.estimate import Estimate, intervals, memory_group, parts, time_group, unseen
from ..costs.host_memory import host
from ..costs.job import Job
from ..costs.memory import GIB
from ..hardware import Gpu, calibration
from ..hardware.network import joined, links
from ..shape.find import named_config, positions_of
from ..shape.from_config import sparse_attention
from ..shape.lora import token_parameters
from ..shape.model_shape import ModelShape
from .answer import factors_of_time, known, needed, speed_and_price, speed_of

ROWS = 10  # of the table


def say(label: str, text: str) -> None:
    """Print a line of the answer: a label, and the text beside it."""
    print(wrapped(f"{label:9}{text}", 9))


def say_command(line: str) -> None:
    """Print a command with what stands before it, so that it can be copied where lines are narrow, too."""
    whole_words = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace(" ", "\0"), line)
    width = max(40, (columns() or len(line) + 2) - 2)
    parts = textwrap.wrap(whole_words, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    print(" \\\n".join(parts).replace("\0", " "))


def say_all(sentences: Iterable[str]) -> None:
    """Print each sentence on a line of its own."""
    for sentence in sentences:
        print(wrapped(sentence))


def columns() -> int | None:
    """Return the terminal's width, or what COLUMNS says; None for a file or a pipe."""
    return max(40, shutil.get_terminal_size().columns) if has_width() else None


def wrapped(text: str, indent: int = 0) -> str:
    """Return text in lines as wide as the terminal; on one line for a file or a pipe."""
    width = columns()
    if not width:
        return text
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def warnings(model: str, workload: Workload, device: Gpu) -> list[str]:
    """Warn of sequences beyond the model's positions, of sparse attention, of what the model carries beside its decoder, and of a
    GPU without bf16."""
    config, shape, said = named_config(model)[0], workload.shape, []
    positions = positions_of(config)
    if positions and workload.length > positions:
        how = "train.py takes them where the recipe says rope_parameters (docs/parallelism.md)"
        said.append(f"{workload.length:,} tokens are more than the {positions:,} positions of {shape.name}: {how}.")
    sparse = sparse_attention(config)
    if sparse:
        how = "this counts attention to all earlier tokens, and nothing for choosing some"
        said.append(f"The attention of {shape.name} is sparse ({sparse}): {how}.")
    said += of_layers(shape)
    if shape.other and not workload.images:
        towers = [name for key, name in (("vision_config", "vision"), ("audio_config", "audio")) if config.get(key)]
        tower = "a vision tower" if towers else "more than a decoder"
        tower = f"{' and '.join(towers)} towers" if len(towers) > 1 else tower
        what = f"{billions(shape.other)} parameters, which a run freezes"
        said.append(f"{shape.name} carries {tower} of {what}.")
    if not device.bf16:
        said.append(f"The {device.kind} has no bf16: this is planned for fp16 (recipe: fp16: true).")
    return said


def of_layers(shape: ModelShape) -> Iterator[str]:
    """Say as what the layers are counted that no run of published tables has."""
    if shape.mixer:
        packages = " and ".join(shape.mixer.packages.values())
        how = f"counted as {packages} compute it; without them it takes several times the memory and time, "
        how += "and no run of published tables has such layers"
        layers = counted(shape.mixer.layers, "layer")
        place = "beside" if shape.mixer.beside else "instead of"
        yield f"{layers} of {shape.name}'s {shape.layers} have a {shape.mixer.kind} {place} attention: {how}."
    if shape.masked:
        how = "so SDPA computes attention in all layers, with masks where they have a window. It is counted as twice as slow as "
        how += "FlashAttention-2, which was measured with narrower heads; no run of published tables has such layers"
        yield f"{shape.name} has heads of {shape.head_dim}, wider than FlashAttention takes, {how}."


def between(low: str, high: str) -> str:
    """The 80 % interval in words."""
    return f"80 % interval: {low} to {high}"


def with_liger(workload: Workload, cluster: Cluster, winner: Candidate) -> None:
    """Print what fused kernels would bring, which need a package that requirements.txt leaves out."""
    other = search.chosen(search.candidates(replace(workload, kernels=WITH_LIGER), cluster))
    if other and winner.seconds > search.NEAR * other.seconds:
        speed, gain = speed_of(other.estimate)[0], winner.seconds / other.seconds - 1
        there = f"{other.name}, micro-batch {other.estimate.job.micro_batch}, {speed} tokens/s/GPU ({gain:+.0%})"
        say("liger", f"with liger-kernel installed and use_liger_kernel: {there}; --liger plans with it")


def nothing_fits(found: goals.Answer) -> str:
    """Return what to do where nothing fits, or nothing but what is slow."""
    if all(candidate.choice.why_only for candidate in found.ranked):
        return "train.py runs none of these. Leave --strategy out to see what it runs."
    change = explain.smallest_change(found.workload, found.cluster)
    measure = f" {goals.MEASURE}." if " nodes instead of " in change else ""
    if found.slow:
        cure = change or "GPUs with more memory, or a faster network"
        why = f"{explain.why_slow(found.slow)}. What would do: {cure}.{measure}"
        return f"Possible and slow: {takes(found.slow, found.cluster)}. No strategy is recommended here: {why}"
    if change:
        left_out = "" if found.workload.asked else explain.left_out(found.workload)
        nothing = "No strategy that was named fits" if found.workload.asked else "Nothing that train.py runs fits"
        return f"{nothing}. The smallest change that does: {change}.{measure}{left_out}"
    return (
        "Nothing that train.py runs fits, with up to 64 nodes, adapters, fused kernels or shorter sequences either: "
        "take GPUs or hosts with more memory."
    )


def takes(candidate: Candidate, cluster: Cluster, tokens: float | None = None, price: float | None = None) -> str:
    """Return what a strategy takes on a cluster: `ZeRO-3 on 2 x 8 H100 80GB, 67 of 79 GiB ..., 13,500 tokens/s in all (...)`."""
    result = candidate.estimate
    where = f"{candidate.name} on {cluster.title} {result.gpu.kind}"
    return f"{where}, {needed(result)}, {speed_and_price(result, tokens, price)}"


def comparison(workload: Workload, cluster: Cluster, ranked: list[Candidate], winner: Candidate | None) -> Table:
    """Return a table of ten candidates, the chosen one and the fastest others, with why each was not chosen.

    What does not fit is in it only where nothing does: else unfitting() names it.
    """
    shape, device = workload.shape, ranked[0].estimate.gpu
    learned = "" if workload.objective == SFT else f"{workload.comparison.title}, "
    two = "2 x " if workload.pairs else ""
    title = (
        f"{shape.name}: {billions(shape.parameters)} parameters, {learned}{workload.method}, {workload.batch} x "
        f"{two}{workload.length:,} tokens a step, {cluster.title} {device.kind}"
    )
    narrow = (columns() or 160) < 120  # the chosen one is told in full below the table
    names = ["strategy", *([] if narrow else ["micro-batch", "recomputes", "kernels"])]
    names += [f"of {device.memory_gib:.0f} GiB", "tokens/s/GPU"]
    mfu = workload.method == "full" and not narrow
    table = Table(*names, *(["MFU"] if mfu else []), "why", title=title)
    fitting = [candidate for candidate in ranked if candidate.fits]
    for candidate in sorted(fitting or ranked, key=lambda one: one is not winner)[:ROWS]:  # the chosen one first
        result, fits = candidate.estimate, candidate.fits
        details = [str(result.job.micro_batch), recomputes(result.job), candidate.kernels]
        cells = [candidate.name, *([] if narrow else details)]
        cells += [f"{result.device_gib:.0f}", speed_of(result)[0] if fits else ""]
        cells += [f"{result.mfu:.0f}%" if fits else ""] if mfu else []
        style = "bold green" if candidate is winner else "" if fits else "dim"
        table.add_row(*cells, explain.reason(candidate, winner), style=style)
    return table


def unfitting(ranked: list[Candidate]) -> list[str]:
    """Return one sentence at most, which names what does not fit, with what is too much."""
    others = [candidate for candidate in ranked if not candidate.fits]
    named = ", ".join(f"{candidate.name} ({explain.too_much(candidate)})" for candidate in others)
    return [f"Does not fit: {named}."] if others else []


def recomputes(job: Job) -> str:
    """What is recomputed in the backward pass: `layers`, `1 layer of 2`, `every second product` or `nothing`."""
    if job.checkpointing == "full":
        where = ", whose inputs wait in host memory" if job.inputs_on_host else ""
        return (f"1 layer of {job.every}" if job.every > 1 else "layers") + where
    return "every second product" if job.checkpointing == "selective" else "nothing"


def trained(job: Job, whole: Collection[str], tokens: int = 0) -> None:
    """Print what is trained where that is adapters, and beside them: modules whole, and embeddings of `tokens`."""
    if job.trained:
        beside, rows = len(whole) * job.shape.vocab * job.shape.hidden, token_parameters(job.shape, tokens)
        print(trains(job.trained - beside - rows, beside, list(whole), tokens, rows))


def batch(winner: Candidate) -> None:
    """Print how a candidate makes its batch, and what computes it."""
    job = winner.estimate.job
    ranks = counted(job.data, "data-parallel rank")
    made = f"micro-batch {job.micro_batch} x accumulation {job.accumulation} x {ranks}"
    say("batch", f"{made}; recomputes {recomputes(job)}; {winner.kernels}; {job.optimizer}")


def describe(result: Estimate, tokens: float = goals.BILLION, price: float | None = None) -> None:
    """Print one configuration in parts, and what so many tokens take. price: US dollars for an hour of a GPU"""
    job, needs = result.job, host(result.job)
    if job.axes:
        say("axes", axes_line(result))
    say("samples", samples(job))
    allocated, low, high = known(result.allocated_gib, *result.memory_interval())
    besides = {"gaps": result.gaps, "ZeRO-3's streams": result.streams, "context": result.context}
    needed = f"{result.device_gib:.1f} GiB on each GPU: {parts(vars(result.memory) | besides, GIB, 0.05)}"
    say("memory", f"{needed}. Torch allocates {allocated} GiB ({between(low, high)})")
    if result.may_fit:
        shown, low, high = known(result.shown_gib, *result.shown_interval())
        cache = f"with {result.cache / GIB:.1f} of cache, which torch gives back where memory is short"
        used = f"{shown} of {result.gpu.memory_gib:.1f} GiB in use"
        say("card", f"nvidia-smi shows {used} ({between(low, high)}), {cache}")
    loading, training, low, high = (f"{size / GIB:,.0f}" for size in (needs.loading, needs.training, *needs.fullest))
    disks = f"; {needs.swapped / 1e9:,.0f} GB of local disk on each" if needs.swapped else ""
    held = f"{loading} GiB of memory on each while loading, {training} while training"
    say("host", f"{held} (the larger, {between(low, high)}){disks}")
    say("disk", f"{checkpoint(needs.checkpoint)} for a checkpoint")
    step, low, high = known(result.time.total, *result.time_interval())
    say("time", f"{step} s per step ({between(low, high)}): {parts(vars(result.time), 1, 0.005)}")
    if job.nodes > 1:
        usual = "" if job.link else ", as is usual for that GPU: --network says another"
        size = joined(job.link, job.node_size)
        if job.gpus <= size:
            rate = f"{result.gpu.peer_gb_s:,.0f} GB/s between two of them"
            say("network", f"NVLink joins all hosts (up to {size} GPUs): {rate}")
        else:
            say("network", f"{links(result.gpu, job.link, job.node_size).gbit:,.0f} Gbit/s between nodes{usual}")
    if job.replicas.count > 1:
        say("replicas", averaging_advice.described(result))
    fast, slow = factors_of_time(result)
    # 6 N FLOPs per token are those of full fine-tuning: adapters' share of them says nothing.
    mfu = "; MFU {} %, {} to {}".format(*known(result.mfu, result.mfu / slow, result.mfu / fast))
    used = mfu if job.method == "full" else ""
    say("speed", "{} tokens/s on each GPU, {} to {}".format(*speed_of(result)) + used)
    spent = [result.hours(tokens) * factor for factor in (1, fast, slow)]
    took = "{} tokens take {} hours, {} to {}".format(goals.tokens_in_words(tokens), *known(*spent))
    took += "; {} GPU-hours, {} to {}".format(*known(*(each * job.gpus for each in spent)))
    usd, source = goals.price(result.gpu.kind, price)
    if source:
        took += ", {} USD, {} to {}".format(*known(*(each * job.gpus * usd for each in spent)))
        took += f", at {usd:g} for an hour of a GPU ({source})"
    say("duration", took)


def samples(job: Job) -> str:
    """Say how long the sequences are that are counted, and which key decides that."""
    if job.packed:
        return f"packed (data.packing: true), so that each sequence has {job.sequence:,} tokens"
    longest = f"a batch in which one has max_length, {job.length:,.0f} tokens"
    return f"padded to the longest of their batch (data.packing: false): counted is {longest}; shorter ones take less"


def say_notes(result: Estimate) -> None:
    """Print what limits an answer: what no interval has, what nobody measured, and what was measured on the user's own GPUs."""
    for note in _notes(result):
        say("note", note)


def _notes(result: Estimate) -> Iterator[str]:
    job, kind = result.job, result.gpu.kind
    if tuple(job.axes.used) in UNPROVEN:
        yield f"axes unproven: fewer than five sources have published runs of {' x '.join(job.axes.used)} together"
    if job.expert > 1:
        yield "a rank that gets more tokens for its experts than its share needs more memory: no interval has that"
    if result.may_fit and not result.fits:
        yield "at the upper end it does not fit: try it on one host first, or shorter sequences or fewer per GPU"
    if result.crowded:
        took = "took up to 3.8 times as long as predicted (docs/evidence/planner-accuracy.md)"
        yield f"most of a step waits, and published runs of ZeRO-3 on so many ranks {took}"
    if result.one_card_seconds > 1.1 * result.time.total:
        longer = known(result.one_card_seconds, *result.time_interval())[0]
        yield f"not measured: a step takes {longer} s if one card of each host does all the work. {goals.MEASURE}"
    for what, group in {"memory": memory_group(job), "time": time_group(job, result.gpu)}.items():
        if unseen(what, group):
            few = f"{what} unseen: fewer than five sources have published such runs ({_in_words(group)})"
            yield f"{few}, so its interval is that of what is seen first"
    if not result.gpu.seen:
        yield f"the {kind} is known only by its data sheet: {result.gpu.source}"
    if factors := calibration.factors(kind):
        said = ", ".join(f"{name} {factor}" for name, factor in factors.items())
        yield f"measured on your {kind}, and counted in: {said} ({calibration.where()})"


def _in_words(group: str) -> str:
    """Return `DeepSpeed over a network that is only named` of the group `zero, named`."""
    of, _, network = group.partition(", ")
    between_hosts = f" over a network that is {'only ' * (network == 'named')}{network}"
    over = {"": "", "inside a host": " inside a host"}.get(network, between_hosts)
    return {"zero": "DeepSpeed", "fsdp2": "FSDP2", "ddp": "DDP", "stages": "pipelines"}.get(of, of) + over


def axes_line(result: Estimate) -> str:
    """Return `pipeline 4 x data 4; 10, 10, 9, 7 layers in its stages, which idle for 12 % of a step`"""
    job, bubble = result.job, result.time.bubble / result.time.total
    line = f"{job.axes} x data {job.data}"
    if job.pipeline == 1:
        return line
    return f"{line}; {', '.join(map(str, division(job).layers))} layers in its stages, which idle for {bubble:.0%} of a step"


def checkpoint(size: float) -> str:
    """Return `27.5 GB (80 % interval: 27.5 to 27.8)`"""
    unit, name = (1e9, "GB") if size >= 1e8 else (1e6, "MB")
    digits = 2 if size < 10 * unit else 1 if size < 100 * unit else 0
    value, low, high = (f"{factor * size / unit:,.{digits}f}" for factor in (1, *intervals()["disk"]))
    return f"{value} {name} ({between(low, high)})"
