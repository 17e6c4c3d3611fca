"""How often each rank's host waits for its device in a step of a run, and in which line: Python must run ahead of a GPU.

On fake GPUs (testing/fake_gpu/) each wait is told by the device. On real ones torch tells of those that it causes itself: `item`,
copies, masks as indices (torch.cuda.set_sync_debug_mode), but not of `synchronize` nor of what a library does in its own kernels.
"""

import json
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from .ranks import REPOSITORY

MESSAGE = "called a synchronizing CUDA operation"
OURS = ("brigade/", "testing/", "train.py")
LOGGING = "_maybe_log_save_evaluate"  # of Transformers' Trainer: what a line of the log costs
# What waits now and then, and is not counted: once a minute, twice in a run, around evaluations and checkpoints.
SELDOM = ("seconds_of_a_product", "_training_time", "pause")
PACKAGES = re.compile(r"(?:site|dist)-packages/")  # Debian's and NVIDIA's containers have the latter
NO_LINE = "a thread of autograd's"  # which runs no Python
# Frames that only pass on what another line asked for; the rest of a path from site-packages or the repository on.
PASS_ON = ("testing/fake_gpu/", "testing/waits.py", "torch/", "warnings.py", "contextlib.py", "deepspeed/utils/nvtx.py",
           "deepspeed/accelerator/")  # fmt: skip


class Waits:
    """Counts waits, each by when it happens, what for and in which line.

    when: "micro-step" within a micro-step that is not the last of its step, "step" later in it, "log line" where a line is
    written; None while nothing is counted
    """

    def __init__(self) -> None:
        self.when: str | None = None
        self.found: Counter[tuple[str, str, str]] = Counter()
        self.steps = self.micro_steps = 0
        self.none = ""  # why waits cannot be counted

    def note(self, why: str) -> None:
        """Count a wait of the thread that calls this."""
        if self.when:
            frames = list(_outwards(sys._getframe().f_back))
            functions = {frame.f_code.co_name for frame in frames}
            if functions.isdisjoint(SELDOM):
                self.found["log line" if LOGGING in functions else self.when, why, place(frames)] += 1

    def callback(self, first: int) -> Any:
        """Return a Trainer's callback: it counts from the beginning of step `first` (from 2 on) to the end of the last."""
        from transformers import TrainerCallback

        waits = self

        class Counts(TrainerCallback):
            """From the end of one step to that of another, so that what lies between steps counts as often as they do."""

            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if waits.when and args.gradient_accumulation_steps > 1:
                    waits.when, self.left = "micro-step", args.gradient_accumulation_steps - 1

            def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                self.left -= 1
                if waits.when and not self.left:
                    waits.when = "step"

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if waits.when:
                    waits.steps, waits.when = waits.steps + 1, "step"
                if state.global_step == first - 1:
                    waits.micro_steps, waits.when = args.gradient_accumulation_steps, "step"
                    waits.none = _tell(waits.note)
                elif state.global_step == state.max_steps:
                    waits.when = None

            left = 0

        return Counts()

    def report(self) -> dict[str, Any]:
        """Return {"micro_steps" in a step, "none", "waits"}, a wait being {"line", "why", "micro-step", "step", "log line"}: how
        often in each micro-step, and how often beside in each step and log line."""
        every: dict[tuple[str, str], Counter[str]] = {}
        for (when, why, line), count in self.found.items():
            every.setdefault((line, why), Counter())[when] += count
        waits = [{"line": line, "why": why} | self._rates(counts) for (line, why), counts in sorted(every.items())]
        return {"micro_steps": self.micro_steps, "none": self.none, "waits": waits}

    def write(self, folder: Path, rank: int) -> None:
        """Leave a rank's report for read()."""
        folder.mkdir(exist_ok=True)
        (folder / f"{rank}.json").write_text(json.dumps(self.report()))

    def _rates(self, counts: Counter[str]) -> dict[str, float]:
        """Return the rates of a line: in each micro-step what it waits in the earlier ones and in the last, the rest per step."""
        earlier = self.micro_steps - 1
        first, last, logged = (counts[when] / self.steps for when in ("micro-step", "step", "log line"))
        each = min(first / earlier, last) if earlier else 0.0
        rates = {"micro-step": each, "step": first + last - self.micro_steps * each, "log line": logged}
        return {when: round(rate, 2) for when, rate in rates.items()}


def read(folder: Path, ranks: int) -> dict[str, Any]:
    """Return what all ranks of a run have written: {"micro_steps", "none", "ranks"}, the last a list of {"ranks", "waits"}: those
    that wait alike, with their waits as Waits.report() has them. Raises FileNotFoundError where a rank has left none."""
    reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    alike: list[dict[str, Any]] = []
    for rank, report in enumerate(reports):
        same = next((group for group in alike if group["waits"] == report["waits"]), None)
        if same:
            same["ranks"].append(rank)
        else:
            alike.append({"ranks": [rank], "waits": report["waits"]})
    none = next((report["none"] for report in reports if report["none"]), "")
    return {"micro_steps": reports[0]["micro_steps"], "none": none, "ranks": alike}


def total(waits: Iterable[dict[str, Any]], micro_steps: int) -> float:
    """Return how often a step of so many micro-steps waits, a line of the log included."""
    return sum(micro_steps * each["micro-step"] + each["step"] + each["log line"] for each in waits)


def of_ours(waits: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the waits of our own lines."""
    return [each for each in waits if each["line"].startswith(OURS)]


def in_each_micro_step(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the waits of our own lines that any rank repeats in each micro-step."""
    return [each for group in report["ranks"] for each in of_ours(group["waits"]) if each["micro-step"]]


def place(frames: Iterable[FrameType]) -> str:
    """Return the innermost line that a wait is due to, as `file:line function`; ours without a number, which each edit moves."""
    for frame in frames:
        path = PACKAGES.split(frame.f_code.co_filename)[-1].removeprefix(f"{REPOSITORY}/")
        if not any(path.startswith(part) or path.endswith(f"/{part}") for part in PASS_ON):
            line = "" if path.startswith(OURS) else f":{frame.f_lineno}"
            return f"{path}{line} {frame.f_code.co_name}"
    return NO_LINE


def _outwards(frame: FrameType | None) -> Iterable[FrameType]:
    while frame:
        yield frame
        frame = frame.f_back


def _tell(note: Callable[[str], None]) -> str:
    """Let note(why) be called at each wait from now on, on the thread that waits. Returns why it cannot be; "" where it can."""
    if "FAKE_GPU_LIBRARY" in os.environ:
        from .fake_gpu.native import native

        native.on_wait(note)
        return ""
    import torch

    def shown(message: Warning | str, *_: Any, **__: Any) -> None:
        if MESSAGE in str(message):
            note("a synchronizing operation")

    try:
        torch.cuda.set_sync_debug_mode("warn")
    except (AttributeError, RuntimeError) as error:  # a torch without the mode, or without a GPU
        return str(error)
    warnings.simplefilter("always")
    warnings.showwarning = shown
    return ""
