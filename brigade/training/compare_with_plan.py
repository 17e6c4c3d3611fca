"""After the tenth step: what the planner predicts of this run, and what was measured. One line, and an entry in run.yaml."""

import time
from dataclasses import replace
from typing import Any

import torch
from transformers import TrainerCallback

from ..distributed import ranks
from ..model.attention import SAMPLE_BY_SAMPLE
from ..run.directory import Run, add_to_record
from ..upstream import attention_of
from . import preflight
from .throughput import Meter, device_name

STEPS = 10
WARM_UP = 4  # of them: kernels are chosen and compiled, the allocator grows


class CompareWithPlan(TrainerCallback):
    """Counts the steps of this process, resumed or not. On every rank, for its figures are the slowest and fullest one's.

    config: the model's; trained: parameters with gradients
    """

    def __init__(self, run: Run, meter: Meter, config: Any, trained: int) -> None:
        self.run, self.meter, self.config, self.trained = run, meter, config, trained
        self.steps, self.began = 0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1
        if self.steps == WARM_UP:
            self.began = self._training_time()
        elif self.steps == STEPS:
            measured = self._measured((self._training_time() - self.began) / (STEPS - WARM_UP))
            if self.run.world.is_main_rank:
                self._compare(measured)

    def _training_time(self) -> float:
        """Seconds, pauses left out, when the device has done what it was given."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - self.meter.paused_ever

    def _measured(self, seconds: float) -> dict[str, float]:
        """The largest figures of any rank, of steps that took so many seconds. A collective."""
        usual = [about for abouts, _ in self.meter.first[WARM_UP:] for about in abouts]
        every = [about for abouts, _ in self.meter.first for about in abouts]
        waited = sum(waited for _, waited in self.meter.first[WARM_UP:]) / (STEPS - WARM_UP)
        self.meter.first, self.meter.first_steps = [], 0  # done with
        slots, tokens = sum(about.slots for about in usual), max(1, sum(about.tokens for about in usual))
        row = {
            "tokens": slots / len(usual),
            "attended": sum(about.squared_lengths for about in usual) / tokens,
            "labelled": sum(about.logits for about in usual) / slots,
            "row": sum(about.slots * about.row for about in usual) / slots,
            "largest": max(about.slots for about in every),
            "most_labelled": max(about.logits for about in every),
            "seconds": seconds,
            "waited": waited,
            "allocated": self.meter.training_peak_gib(),
        }
        of_ranks = ranks.gather(row)
        return {key: max(other[key] for other in of_ranks) for key in row}

    def _compare(self, seen: dict[str, float]) -> None:
        from ..planner.choice import job_of_run, margins
        from ..planner.costs import calibration, hardware

        allocated = seen["allocated"] if torch.cuda.is_available() else None
        measured = margins.Measured(STEPS, WARM_UP, seen["seconds"], seen["waited"], allocated)
        name, promised, usual, reason = device_name(), None, None, ""
        device = hardware.gpu_of_device(name)
        if device is None:
            reason = f"the catalogue does not know device {name!r}; describe it under gpus: in {calibration.named()}"
        else:
            try:
                usual, largest = self._as_seen(self._job(device.kind), seen)
                promised = margins.predict(usual, largest, device)
            except job_of_run.NotCovered as error:
                reason = str(error)
            except Exception as error:  # a run that trains does not end for an estimate's sake
                reason = f"the formulas fail on it ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        if device or name != "cpu":  # nobody plans for a CPU, unless they describe it as a kind of GPU
            print(*margins.report(promised, measured, reason), sep="\n", flush=True)
        entry = margins.entry(promised, measured, device, reason)
        add_to_record(self.run, "promise", entry | ({"job": job_of_run.record(usual)} if promised and usual else {}))

    def _job(self, gpu: str) -> Any:
        """The run as the planner's Job."""
        from ..planner.choice import job_of_run

        run, recipe = self.run, preflight.recipe_here(self.run.settings)
        sizes, config = (run.world.size, run.world.local_size), self.config.to_dict()
        trained = self.trained if recipe.model.use_peft else 0
        job = job_of_run.job_of_run(
            recipe, run.strategy, run.batch, *sizes, config, gpu, trained=trained, place="the model's config"
        )
        return replace(job, attention=job_of_run.ATTENTION.get(attention_of(self.config), "flash2"))

    def _as_seen(self, job: Any, seen: dict[str, float]) -> tuple[Any, Any]:
        """The usual micro-batch of these steps, and the largest."""
        from ..planner.choice.job_of_run import as_seen

        # Without cumulative lengths a mask hides the other samples of a row, and its products are computed all the same, those
        # above the diagonal too: the formulas count half of a square.
        masked = seen["row"] * (1 if job.attention == "eager" else 2)
        attended = seen["attended"] if attention_of(self.config) in SAMPLE_BY_SAMPLE else masked
        usual = as_seen(job, attended=attended, tokens=seen["tokens"], labelled=seen["labelled"])
        most = min(1.0, seen["most_labelled"] / seen["largest"])
        return usual, as_seen(job, attended=attended, tokens=seen["largest"], labelled=most)
