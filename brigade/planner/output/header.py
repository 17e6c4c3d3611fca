"""A recipe's header: what it is for, and what the planner says of it. One function writes all of them."""

import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import wrap

from ...recipe import flags
from ...recipe.flags import Settings
from ...strategy import Strategy
from ..choice.estimate import Estimate, estimate, parts
from ..choice.job_of_recipe import Source, here, hosts_of, job_of, source_of, strategy_of
from ..costs.host_memory import gigabytes, host
from ..costs.memory import GIB, held_states
from ..costs.network import links

WIDTH, INDENT = 126, 12
NAMES = {"single": "one process", "ddp": "DDP", "fsdp2": "FSDP2", "hsdp": "HSDP"}
FILES = {"zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "zero3_hpz": "ZeRO-3 hpZ", "zeropp": "ZeRO++"}
CONFIGS = {
    "exact": "its own, byte for byte",
    "copies": "from public copies that agree; no hash of the Hub's was found",
    "copy": "from one public copy; no hash of the Hub's was found",
    "values": "its values, from one public copy, laid out anew: compare it with the one on the model's page",
}


@dataclass(frozen=True)
class Planned:
    """A recipe with what the planner says of it.

    link: the network between hosts, "" for the GPU kind's usual one; goes_to: where a recipe will lie that is not there yet
    """

    settings: Settings
    link: str = ""
    goes_to: Path | None = None

    @property
    def file(self) -> Path:
        return self.goes_to or self.settings.recipe_path

    @property
    def path(self) -> str:
        """As commands name it."""
        return here(self.file)

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(job_of(self.settings, self.link))

    @cached_property
    def strategy(self) -> Strategy:
        return strategy_of(self.settings)

    @property
    def source(self) -> Source:
        return source_of(self.settings.recipe.model.model_name_or_path)

    @property
    def hosts(self) -> dict[str, int]:
        return hosts_of(self.settings)

    @property
    def cluster(self) -> str:
        """`2 x 8 H100 80GB`"""
        gpus, kind = self.estimate.job.gpus, self.estimate.gpu.kind
        return f"1 {kind}" if gpus == 1 else f"{len(self.hosts)} x {max(self.hosts.values())} {kind}"

    @property
    def strategy_name(self) -> str:
        name = self.strategy.name
        return FILES.get(name) or NAMES.get(self.strategy.kind) or name.replace("zero", "ZeRO-").replace("_", " ")


def commands(planned: Planned) -> list[str]:
    """What to type: the recipe on its own cluster, and its rehearsal. One GPU has eight as its second way."""
    recipe, cluster = shlex.quote(planned.path), planned.settings.recipe.cluster
    job = planned.estimate.job
    lines = [f"python train.py --recipe {recipe}"]
    if cluster.hostfile:
        hostfile = shlex.quote(cluster.hostfile)
        lines = [f"python -m brigade launch {recipe} --hostfile {hostfile}"]
        if planned.strategy.is_deepspeed:
            lines.append(f"deepspeed --hostfile {hostfile} train.py --recipe {recipe}")
        elif len(planned.hosts) == 1:
            lines.append(f"torchrun --nproc_per_node {job.gpus} train.py --recipe {recipe}")
    elif divides(planned, 8):
        lines.append(f"torchrun --nproc_per_node 8 train.py --recipe {recipe}")
    return [*lines, f"python train.py --recipe {recipe} --rehearse  # tiny shapes, any machine"]


def divides(planned: Planned, ranks: int) -> bool:
    job = planned.estimate.job
    return planned.settings.recipe.training.global_batch_size % (job.micro_batch * ranks) == 0


def _hardware(planned: Planned) -> str:
    result, net = planned.estimate, links(planned.estimate.gpu, planned.link, planned.estimate.job.node_size)
    text = f"{planned.cluster} ({result.gpu.memory_gib:.0f} GiB{' each' * (result.job.gpus > 1)})"
    if result.job.gpus > 1:
        text += f", {result.gpu.peer_gb_s:.0f} GB/s between two of a host"
    if result.job.nodes > 1:
        text += f", {net.gbit:,.0f} Gbit/s from host to host"
    return f"{text}."


def _memory(planned: Planned) -> str:
    result = planned.estimate
    job, total = result.job, result.gpu.memory_gib
    count = f"{job.shape.parameters:,} parameters{' (the published number)' * bool(planned.source.published)}"
    if job.trained:
        count += f" and {job.trained:,} trained beside them"
    low, high = result.memory_interval()
    held = held_states(job)
    lost = result.device_gib - result.allocated_gib - result.context / GIB
    return (
        f"{result.device_gib:.1f} of {total:.1f} GiB on each GPU, {result.spare_gib:.1f} GiB "
        f"({result.spare_gib / total:.0%}) to spare: {parts(result.memory, GIB, 0.05)}, allocator {lost:.2f}, "
        f"context {result.context / GIB:.2f}. In four runs of five torch allocates {low:.0f} to {high:.0f} GiB. "
        f"{count}: {held.total / GIB:.1f} GiB of model states on each GPU."
    )


def _host(planned: Planned) -> str:
    needs = host(planned.estimate.job)
    least, most = (size / GIB for size in needs.fullest)
    return (
        f"each host needs {needs.loading / GIB:,.0f} GiB of memory while it loads and {needs.training / GIB:,.0f} GiB while "
        f"it trains (the larger: {least:,.0f} to {most:,.0f} in four runs of five). A checkpoint takes "
        f"{gigabytes(needs.checkpoint)} of disk."
    )


def _speed(planned: Planned) -> str:
    result = planned.estimate
    fast, slow = result.time_interval()
    mfu = f", MFU {result.mfu:.0f}%" if result.job.method == "full" else ""  # its convention is that of all weights
    days, hours = result.days, 24 * result.days * result.job.gpus
    return (
        f"{result.time.total:.2f} s per step ({fast:.2f} to {slow:.2f} in four runs of five), "
        f"{result.tokens_per_second_per_gpu:,.0f} tokens/s/GPU{mfu}. A billion tokens take "
        f"{days:.2f} days, {hours:,.0f} GPU-hours. Seconds of a step: {parts(result.time, 1, 0.005)}."
    )


def _batch(planned: Planned) -> str:
    job, data = planned.estimate.job, planned.settings.recipe.data
    what = f"packs of {data.max_length:,} tokens" if data.packing else "sequences"
    size = job.micro_batch * job.accumulation * job.gpus
    text = f"{size} {what} = micro-batch {job.micro_batch} x accumulation {job.accumulation} x {job.gpus} GPU"
    text += "s" * (job.gpus > 1)
    if not planned.settings.recipe.cluster.hostfile and divides(planned, 8):
        text += f" = {job.micro_batch} x {size // job.micro_batch // 8} x 8 GPUs"
    return f"{text}."


def _model(planned: Planned) -> str:
    source, revision = planned.source, planned.settings.recipe.model.revision
    text = f"config.json beside this file is that of {source.hub}"
    text += f" at revision {revision}" if revision else ""
    text += f": {CONFIGS[source.config]}." if source.config else "."
    if source.licence:
        text += f" The model is gated: accept {source.licence} on its page and set HF_TOKEN."
    if planned.estimate.job.shape.experts and planned.estimate.job.method == "lora":
        text += " Experts are no linear layers and stay as they are: adapters lie on attention alone (docs/methods.md)."
    if planned.estimate.job.shape.family.sinks:
        text += " Its published experts are in MXFP4; they are loaded in bf16, as which they are counted here."
    return text


def _siblings(planned: Planned) -> str:
    others = [here(path) for path in sorted(planned.file.parent.glob("*.yaml")) if path.name != planned.file.name]
    return f"{', '.join(others)}{'; ' if others else ''}recipes/README.md has all models and clusters side by side."


def header(planned: Planned) -> str:
    """The comment that a recipe begins with, its last line empty."""
    job = planned.estimate.job
    base = " of the base model" if planned.source.base else ""
    strategy = "" if job.gpus == 1 else f"{planned.strategy_name} on "
    title = f"{planned.source.name}, {job.title}{base} on chats, {strategy or 'on '}{planned.cluster}."
    entries = {
        "Hardware": [_hardware(planned)],
        "Memory": [_memory(planned)],
        "Host": [_host(planned)],
        "Speed": [_speed(planned)],
        "Batch": [_batch(planned)],
        "Model": [_model(planned)],
        "Siblings": [_siblings(planned)],
    }
    lines = [
        title,
        "Memory and speed are estimated by the planner (python -m brigade plan), not measured.",
    ]
    lines.append("")
    for name, texts in entries.items():
        lines += _entry(
            name,
            [
                line
                for text in texts
                for line in wrap(text, WIDTH - INDENT, break_on_hyphens=False, break_long_words=False)
            ],
        )
        if name == "Batch":
            lines += _entry("Usage", commands(planned))
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _entry(name: str, lines: list[str]) -> list[str]:
    return [f"{f'{name}:' if not number else '':<10}{line}" for number, line in enumerate(lines)]


def replaced(text: str, comment: str) -> str:
    """A recipe's text with this header instead of its own."""
    lines = text.splitlines(keepends=True)
    first = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return comment + "".join(lines[first:])


def load(path: Path, link: str = "", goes_to: Path | None = None) -> Planned:
    return Planned(flags.load(["--recipe", str(path)]), link, goes_to)
