"""Predict a run with the planner: whether its model can be loaded at all; and set the prediction beside its first ten steps."""

import math
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from transformers import TrainerCallback

from ...errors import first_line
from ...errors.tables import Fields
from ...train.distributed import ranks
from ...train.host import control_groups
from ...train.model.attention import SAMPLE_BY_SAMPLE
from ...train.run.directory import Run, add_to_record
from ...train.upstream import attention_of
from ...train.watch.measured_states import OneStep
from ...train.watch.throughput import STATES, STEPS, WARM_UP, Meter, device_name
from .. import hardware
from ..choice import job_of_run
from ..choice.job_of_run import NotCovered
from ..costs.estimate import estimate
from ..costs.host_memory import copied, whole_on_gpu
from ..costs.job import Job
from ..costs.memory import GIB
from ..hardware import calibration
from .calibrate import record

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, TrainerControl, TrainerState, TrainingArguments


WAITING = 0.1  # of a step: the share of waiting for data from which on it is named as the reason
FOUR_BITS = "leave load_in_4bit out: LoRA's base is read by shards; or take GPUs with more memory"
HOST = "take hosts with more memory, or raise their limit; FSDP2 reads one weight after the other"


@dataclass(frozen=True)
class Prediction:
    """GiB that torch's allocator has allocated at most on the fullest rank, and seconds of a step, with their 80 % intervals.

    parts: GiB of what is allocated (costs/memory.py)
    """

    allocated_gib: float
    allocated_between: tuple[float, float]
    step_time: float
    step_time_between: tuple[float, float]
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What the first steps of a run took.

    allocated_gib: None without a GPU, where nothing counts what is allocated; data_time: seconds of step_time in which the
    slowest rank waited for data; steps: at whose end this was measured, warm_up: how many of them step_time leaves out
    parts: GiB of the model's states on the fullest rank, and peak, of all that is allocated or, without a GPU, resident"""

    steps: int
    warm_up: int
    step_time: float
    data_time: float
    allocated_gib: float | None
    parts: dict[str, float] = field(default_factory=dict)


def predict(usual: Job, largest: Job, device: hardware.Gpu) -> Prediction:
    """Predict the step time by the usual micro-batch, and memory by the largest one."""
    time, memory = estimate(usual, device), estimate(largest, device)
    parts = {name: value / GIB for name, value in vars(memory.memory).items()}
    return Prediction(memory.allocated_gib, memory.memory_interval(), time.time.total, time.time_interval(), parts)


def report(predicted: Prediction | None, measured: Measured, reason: str = "") -> list[str]:
    """Return the line after the tenth step, and a sentence on what is outside its interval. reason: why nothing is predicted."""
    memory, step = measured.allocated_gib, f"{_seconds(measured.step_time)} s per step"
    figures = [] if memory is None else [f"{memory:.1f} GiB allocated at most"]
    head = f"after {measured.steps} steps: "
    if predicted is None:
        return [f"{head}{', '.join([*figures, step])}; the planner estimates nothing: {reason}"]
    if figures:
        low, high = predicted.allocated_between
        figures[0] += f" (estimated {predicted.allocated_gib:.1f}, 80 % interval {low:.1f} to {high:.1f})"
    expected, fast, slow = map(_seconds, (predicted.step_time, *predicted.step_time_between))
    step += f" (estimated {expected}, 80 % interval {fast} to {slow})"
    sentence = _outside(predicted, measured)
    return [f"{head}{', '.join([*figures, step])}", *([sentence] if sentence else [])]


def _outside(predicted: Prediction, measured: Measured) -> str:
    """Return one sentence on what lies outside its interval, or ""."""
    memory, seconds = measured.allocated_gib, measured.step_time
    least, most = predicted.allocated_between
    fast, slow = predicted.step_time_between
    findings = []
    if memory is not None and memory > most:
        findings.append("it needs more memory than estimated, so plans for runs like it are too tight")
    elif memory is not None and memory < least:
        findings.append("it needs less memory than estimated, so a larger micro-batch may fit")
    if seconds > slow and measured.data_time > WAITING * seconds:
        share = measured.data_time / seconds
        findings.append(f"it waits for data during {share:.0%} of a step (more dataloader_num_workers help)")
    elif not fast <= seconds <= slow:
        teaches = "`python -m brigade plan --calibrate` with this run's directory teaches it to the planner"
        how = "slower" if seconds > slow else "faster"
        findings.append(f"it is {how} than estimated; if this cluster is always so, {teaches}")
    text = ", and ".join(findings)
    return text[:1].upper() + text[1:] + "." if text else ""


def _seconds(value: float) -> str:
    """Return seconds with at least three digits: 2.31, 0.0412"""
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def entry(predicted: Prediction | None, measured: Measured, device: hardware.Gpu | None, reason: str = "") -> Fields:
    """Return prediction and measurement for run.yaml, without the job."""
    record = {"measured": _short(asdict(measured))}
    if predicted is None or device is None:
        return {"none": reason} | record
    factors = {"efficiency": device.efficiency, "network": device.network}
    return {"gpu": device.kind, "predicted": _short(asdict(predicted)) | factors} | record


def _short(values: Fields) -> Fields:
    """Return values with five digits, and pairs as lists."""

    def short(value: object) -> object:
        if isinstance(value, tuple):
            return [short(item) for item in value]
        if isinstance(value, dict):
            return _short(value)
        return float(f"{value:.5g}") if isinstance(value, float) else value

    return {key: short(value) for key, value in values.items()}


def compare(run: Run, config: "PreTrainedConfig", trained: int, seen: dict[str, float]) -> None:
    """Print the line, and write the entry.

    config: the model's; trained: parameters with gradients; seen: what CompareWithPlan has measured
    """
    allocated = seen["allocated"] if torch.cuda.is_available() else None
    parts = {name: seen[name] for name in STATES if seen.get(name)} | {"peak": seen["allocated"]}
    measured = Measured(STEPS, WARM_UP, seen["seconds"], seen["waited"], allocated, parts)
    name, predicted, usual, reason = device_name(), None, None, ""
    device = hardware.gpu_of_device(name)
    if device is None:
        reason = f"the catalogue does not know device {name!r}; describe it under gpus: in {calibration.named()}"
    else:
        try:
            usual, largest = _as_seen(planned_job(run, config, trained, device.kind), config, seen)
            predicted = predict(usual, largest, device)
        except job_of_run.NotCovered as error:
            reason = str(error)
        except Exception as error:  # a run that trains does not end for an estimate's sake
            reason = f"the formulas fail on it ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    if device or name != "cpu":  # nobody plans for a CPU, unless they describe it as a kind of GPU
        print(*report(predicted, measured, reason), sep="\n", flush=True)
    job = {"job": record(usual)} if predicted and usual else {}
    add_to_record(run, "prediction", entry(predicted, measured, device, reason) | job)


def planned_job(run: Run, config: "PreTrainedConfig", trained: int, gpu: str) -> Job:
    """Return the run as the planner's Job."""
    recipe = run.settings.with_training(use_liger_kernel=run.kernels.use_liger_kernel).recipe
    sizes = (run.replica.size, run.world.local_size)
    trained = trained if recipe.model.use_peft else 0
    place = "the model's config"
    job = job_of_run.job_of_run(
        recipe, run.strategy, run.batch, *sizes, config.to_dict(), gpu, trained=trained, place=place
    )
    job_of_run.check_texts(job.images is not None)
    job_of_run.check_kernels(job.shape)
    if job.replicas.every > STEPS:  # they have not met yet
        job = replace(job, replicas=replace(job.replicas, every=math.inf))
    return replace(job, attention=job_of_run.ATTENTION.get(attention_of(config), "flash2"))


def _as_seen(job: Job, config: "PreTrainedConfig", seen: dict[str, float]) -> tuple[Job, Job]:
    """Return the job with the usual micro-batch of these steps, and with the largest."""
    # Without cumulative lengths a mask hides the other samples of a row, and its products are computed all the same, those
    # above the diagonal too: the formulas count half of a square.
    masked = seen["length"] * (1 if job.attention == "eager" else 2)
    attended = seen["attended"] if attention_of(config) in SAMPLE_BY_SAMPLE else masked
    usual = as_seen(job, attended=attended, tokens=seen["tokens"], labelled=seen["labelled"])
    most = min(1.0, seen["most_labelled"] / seen["largest"])
    return usual, as_seen(job, attended=attended, tokens=seen["largest"], labelled=most)


def as_seen(job: Job, *, tokens: float, attended: float, labelled: float) -> Job:
    """Return `job` with what its sequences were.

    tokens: of a micro-batch on one rank; attended: mean length that they attend to; labelled: share of them with logits
    """
    row = max(1, round(tokens * job.context / job.micro_batch))
    return replace(job, sequence=row, attended=attended, labelled=labelled)


def fails_to_load(run: Run, config: "PreTrainedConfig") -> tuple[str, str] | None:
    """Return why this host or this rank's GPU cannot hold a run's model while it loads, and a cure; None where it can, and where
    there is no GPU. Only weights that are there on any run are counted: neither a process nor CUDA's context.

    Print what may be too much for a host, and why nothing is counted where the planner cannot.
    """
    if not torch.cuda.is_available():
        return None
    try:
        job = planned_job(run, config, 0, "")
        on_gpu, least, most = whole_on_gpu(job), copied(job, certain=True), copied(job)
    except Exception as error:  # a run that trains does not end for an estimate's sake
        kind = "" if isinstance(error, NotCovered) else f"the formulas fail on it, {type(error).__name__}: "
        if run.world.is_main_rank:
            print(f"memory while the model loads was not checked: {kind}{first_line(error)}", flush=True)
        return None
    on_device, on_host = torch.cuda.mem_get_info()[1], control_groups.memory()
    if on_gpu > on_device:
        kind = "DeepSpeed" if job.deepspeed else "FSDP2"
        problem = f"each GPU holds the whole model in 4 bits before {kind} cuts its shards, "
        return f"{problem}{_compared(on_gpu, on_device)}", FOUR_BITS
    if least > on_host:
        return f"its processes own copies of weights while the model loads, {_compared(least, on_host)}", HOST
    if most > on_host and run.world.local_rank == 0:
        told = f"its processes may own copies of weights while the model loads, up to {_compared(most, on_host)}"
        print(f"warning: host {run.world.host}: {told}\n  cure: {HOST}", file=sys.stderr, flush=True)
    return None


def _compared(needed: float, there: float) -> str:
    return f"{needed / GIB:.1f} GiB by the planner's count, and it has {there / GIB:.1f}"


class CompareWithPlan(TrainerCallback):
    """Count the steps of this process, resumed or not, and measure them. It runs on every rank, for the slowest and fullest rank
    decides.

    config: the model's; trained: parameters with gradients
    """

    def __init__(self, run: Run, meter: Meter, config: "PreTrainedConfig", trained: int) -> None:
        self.run, self.meter, self.config, self.trained = run, meter, config, trained
        self.steps, self.began = 0, 0.0
        self.states: OneStep | None = None  # of one step within the warm-up
        self.bytes = (0, 0, 0)

    def on_substep_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **_: object
    ) -> None:
        if self.states:
            self.states.on_substep_end(args, state, control)

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **given: object
    ) -> None:
        self.steps += 1
        if self.steps == WARM_UP - 2 and "model" in given:
            self.states = OneStep(args, state, control, **given)
        elif self.states:
            self.bytes, self.states = self.states.end(args, state, control), None
        if self.steps == WARM_UP:
            self.began = self._training_time()
        elif self.steps == STEPS:
            seconds = (self._training_time() - self.began) / (STEPS - WARM_UP)
            measured = largest_of_ranks(self.meter, seconds, self.bytes)
            if self.run.world.is_main_rank:
                compare(self.run, self.config, self.trained, measured)

    def _training_time(self) -> float:
        """Return the seconds without pauses, when the device has done what it was given."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - self.meter.paused_ever


def largest_of_ranks(meter: Meter, seconds: float, states: tuple[int, ...]) -> dict[str, float]:
    """Return the largest figures of any rank, for steps that took so many seconds each. A collective.

    states: bytes of STATES on this rank
    """
    usual = [about for abouts, _ in meter.first[WARM_UP:] for about in abouts]
    every = [about for abouts, _ in meter.first for about in abouts]
    waited = sum(waited for _, waited in meter.first[WARM_UP:]) / (STEPS - WARM_UP)
    meter.first, meter.first_steps = [], 0  # done with
    slots, tokens = sum(about.slots for about in usual), max(1, sum(about.tokens for about in usual))
    row = {
        "tokens": slots / len(usual),
        "attended": sum(about.squared_lengths for about in usual) / tokens,
        "labelled": sum(about.logits for about in usual) / slots,
        "length": sum(about.slots * about.length for about in usual) / slots,
        "largest": max(about.slots for about in every),
        "most_labelled": max(about.logits for about in every),
        "seconds": seconds,
        "waited": waited,
        "allocated": meter.training_peak_gib(),
        **{name: size / 2**30 for name, size in zip(STATES, states, strict=True)},
    }
    of_ranks = ranks.gather(row)
    return {key: max(other[key] for other in of_ranks) for key in row}
