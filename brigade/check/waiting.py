"""What a measured bandwidth means for training: the part of each step that ranks wait for the network, by the planner."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UserError
from ..errors.console import figure
from ..plan.choice.job_of_recipe import KINDS, STRATEGIES, job_of
from ..plan.choice.workload import CHOICES, runs
from ..plan.constants import CONSTANTS
from ..plan.costs.estimate import estimate
from ..plan.costs.job import Job
from ..plan.hardware import gpu
from ..plan.runs.calibrate import take_network
from ..plan.shape.find import named_shape
from .checks import CannotKnow, Hosts, Result, Wanted, check, sound
from .collectives import Sweep, have_gpus
from .findings import compared

# What is spoken of without a recipe.
USUAL_MODEL, USUAL_LENGTH, USUAL_BATCH, USUAL_GPU = "qwen3-8b", 4096, 128, "H100 80GB"
BESIDE = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2")  # strategies that are told of beside the recipe's own


@check("waiting", size="usual", seconds=30, alone=True)
async def waiting(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads what the row of collectives measured, and asks the planner what part of each step the recipe's ranks wait for the
    network with it, and with other strategies. Without a recipe: for a stated model. Threshold: network_wait of thresholds.yaml,
    for hosts with GPUs and a recipe."""
    measured = hosts.wanted.measured.get("network")
    if not isinstance(measured, Sweep):
        raise CannotKnow("no collective was measured")
    said = say(hosts.wanted, measured)
    hosts.wanted.measured["meaning"] = said.sentence
    for host in hosts.hello:
        if have_gpus(hosts) and hosts.wanted.job:
            words = {"sentence": said.sentence, "cure": said.cure}
            yield compared("waits-for-the-network", host, said.share, said.value, said.share, **words)
        else:
            yield sound(host, said.value, said.share)


@dataclass(frozen=True)
class Said:
    """value: for the table; share: of a step that the recipe's own strategy waits; sentence: the same in words"""

    value: str
    share: float
    sentence: str
    cure: str


def say(wanted: Wanted, measured: Sweep) -> Said:
    """Ask the planner. Raises CannotKnow where it has no answer."""
    try:
        return _say(wanted, measured)
    except UserError as error:
        raise CannotKnow(f"the planner has no estimate of this recipe: {error.problem}") from None


def _say(wanted: Wanted, measured: Sweep) -> Said:
    # With which the formulas' rings have the measured rate.
    link = f"{measured.rate * 8 / CONSTANTS.line_share:.6f} Gb/s"
    job, own = _job(wanted, measured, link)
    # The user's factor for the network is about the bandwidth that formulas suppose: here it was measured.
    device = replace(gpu(job.gpu), network=1.0)

    def others() -> "Iterator[tuple[str, Job]]":
        yield own, job
        for choice in (choice for choice in CHOICES if choice.name in BESIDE and not job.axes):
            if choice.name != own and runs(choice, optim=job.optimizer, method=job.method, bf16=True):
                plain = replace(job, shard=0, hpz=0, offload="", quantised=False)
                yield choice.name, replace(plain, engine=choice.engine, stage=choice.stage)

    estimates = {name: estimate(one, device) for name, one in others()}
    fits = {name: one for name, one in estimates.items() if one.fits or name == own}
    shares = {name: one.time.across / one.time.total for name, one in fits.items()}
    first, *rest = (f"{name} waits {share:.0%}" for name, share in shares.items())
    others_wait = "; " + ", ".join(words.replace(" waits", "") for words in rest) if rest else ""
    about = f"by the planner: {job.shape.name}, {job.title}, {job.tokens_per_step:,} tokens per step on {job.gpus} {job.gpu}"
    sentence = f"at this bandwidth ({measured.rate:.3g} GB/s) {first} of each step{others_wait} ({about})"
    fastest = min(fits, key=lambda name: fits[name].time.total)
    gain = fits[own].time.total / fits[fastest].time.total
    cure = "more sequences per step (global_batch_size) for each exchange, or a faster network"
    if gain > 1.1:
        cure = (
            f"take {fastest}: its step takes {figure(fits[fastest].time.total, 2)} s, {gain:.1f} times less; or {cure}"
        )
    less = min((name for name in shares if name != own), key=lambda name: shares[name], default=own)
    beside = f", {less} {shares[less]:.0%}" if less != own else ""
    return Said(f"{own} waits {shares[own]:.0%}{beside}", shares[own], sentence, cure)


def _job(wanted: Wanted, measured: Sweep, link: str) -> "tuple[Job, str]":
    """The recipe on these hosts, or the usual model; and its strategy's name."""
    ranks, node = sum(wanted.slots.values()), max(wanted.slots.values())
    kind = _kind(measured)
    if wanted.job is None:
        shape = named_shape(USUAL_MODEL)
        usual = Job(
            shape, USUAL_LENGTH, engine="zero", stage=3, data=ranks, checkpointing="full", node_size=node,
            gpu=kind or USUAL_GPU, link=link, accumulation=max(1, USUAL_BATCH // ranks),
        )  # fmt: skip
        return usual, "ZeRO-3"
    strategy = wanted.job.strategy
    job = job_of(wanted.job.settings, link, strategy, wanted.slots, kind)
    return job, STRATEGIES.get(strategy.name) or KINDS.get(strategy.kind, strategy.name)


def _kind(measured: Sweep) -> str:
    """The kind of GPU that was found, "" without one or where nobody knows it."""
    try:
        return gpu(measured.device).kind if measured.backend == "nccl" else ""
    except UserError:
        return ""


def calibrate(wanted: Wanted, measured: Sweep | None, file: Path) -> list[str]:
    """Take the measured bandwidth into the user's calibration file; returns what changed, a line each.

    Raises UserError where nothing was measured by which GPUs' runs can be judged.
    """
    place = "flag --calibrate"
    if measured is None:
        raise UserError(place, "no collective was measured", "make the hosts sound first: see the table")
    kind = _kind(measured)
    if not kind:
        problem = f"the hosts' {measured.device} with {measured.backend} says nothing of what runs on GPUs reach"
        raise UserError(place, problem, "run it on hosts with GPUs that `plan --gpu` knows")
    hosts = list(wanted.slots)
    named = hosts[0] if len(hosts) == 1 else f"{hosts[0]} ... {hosts[-1]}, {len(hosts)} hosts"
    link = (wanted.job.settings.recipe.cluster.network or "") if wanted.job else ""
    return take_network(
        kind, f"check of {named}", measured.rate, measured.ranks, max(wanted.slots.values()), link, file
    )
