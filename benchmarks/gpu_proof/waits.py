"""How often the host waits for the device in a step, by the line that waits: torch's own debug mode for synchronisations.

It sees what torch synchronises (`item`, blocking copies, nonzero), not what a library does in its own kernels.
"""

import collections
import json
import os
import shlex
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from testing import parity, runs

from .parts import REPOSITORY
from .subject import Subject, run

STEPS, FIRST, ACCUMULATION = 6, 3, 4  # waits count from step FIRST on
MESSAGE = "called a synchronizing CUDA operation"
FEWEST = 20  # seconds


def main() -> None:
    subject = Subject(__doc__)
    ranks = max(size for size in (1, 2, 4) if size <= max(1, subject.gpus))
    shared = runs.write_inputs(subject.work)
    micro = max(1, runs.GLOBAL_BATCH // ranks // ACCUMULATION)
    micro_steps = runs.GLOBAL_BATCH // ranks // micro
    for name in ("zero3",) if subject.small else ("zero3", "fsdp2", "ddp"):
        found, output = subject.work / f"{name}.waits.json", subject.work / name
        found.unlink(missing_ok=True)
        words = [*shared, *parity.STRATEGIES[name], "--output_dir", str(output), "--fresh", "--bf16", "true"]
        words += ["--max_steps", str(STEPS), "--eval_steps", "99", "--logging_steps", "99", "--max_eval_samples", "1"]
        words += ["--per_device_train_batch_size", str(micro)]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        child = [*launcher, "-m", "benchmarks.gpu_proof.waits", "--count", str(found), *words]
        command = f"python {shlex.join(child)}"
        if subject.left < FEWEST:
            subject.row(name, {}, "not begun: the part's time was over", command)
        elif failed := run([sys.executable, *child], subject.work / f"{name}.log", subject.left - 5):
            subject.row(name, {}, failed, command)
        else:
            judge(subject, f"{name}, {ranks} GPUs", json.loads(found.read_text()), micro_steps, command)


def judge(subject: Subject, what: str, counted: dict[str, Any], micro_steps: int, command: str) -> None:
    """Leave the row of a strategy; it falls short where lines of ours wait in each micro-step."""
    if counted.get("none"):
        subject.row(what, {"not_counted": counted["none"]}, "", command)
        return
    places, steps = counted["places"], counted["steps"]
    per_step = {place: round(count / steps, 2) for place, count in places.items()}
    ours = {place: count for place, count in per_step.items() if place.startswith("brigade/")}
    figures = {"per_step": round(sum(per_step.values()), 2), "ours_per_step": round(sum(ours.values()), 2),
               "micro_steps": micro_steps, "places": per_step}  # fmt: skip
    often = {place: count for place, count in ours.items() if count >= micro_steps}
    shortfall = "; ".join(
        f"{place} waits {count:g} times a step, of {micro_steps} micro-steps" for place, count in often.items()
    )
    subject.row(what, figures, shortfall, command)


# ---- in a rank -----------------------------------------------------------------------------------------------------
def count(into: Path, flags: list[str]) -> None:
    """Train with these flags, and write which lines waited how often in the steps from FIRST on."""
    import torch
    from transformers import TrainerCallback

    import train

    places: collections.Counter[str] = collections.Counter()
    counting = {"on": False, "none": ""}

    class Counts(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == FIRST - 1:
                try:
                    torch.cuda.set_sync_debug_mode("warn")
                except (AttributeError, RuntimeError) as error:  # a torch without the mode
                    counting["none"] = str(error)
                counting["on"] = True

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            counting["on"] = False
            if not counting["none"]:
                torch.cuda.set_sync_debug_mode("default")

    def shown(message: Warning | str, *_: Any, **__: Any) -> None:
        if counting["on"] and MESSAGE in str(message):
            places[place(traceback.extract_stack())] += 1

    warnings.simplefilter("always")
    warnings.showwarning = shown
    train.main(flags, callbacks=(Counts(),))
    if int(os.environ.get("RANK", "0")) == 0:
        kept = {"steps": STEPS - FIRST + 1, "places": dict(places.most_common()), "none": counting["none"]}
        into.write_text(json.dumps(kept))


def place(stack: list[traceback.FrameSummary]) -> str:
    """Return file, line and function of the frame that waits, from the project's root or a package's name on."""
    frames = [frame for frame in stack if not frame.filename.endswith("warnings.py") and frame.name != "shown"]
    frame = frames[-1]
    path = frame.filename.rpartition("site-packages/")[2].removeprefix(f"{REPOSITORY}/")
    return f"{path}:{frame.lineno} {frame.name}"


if __name__ == "__main__":
    if "--count" in sys.argv:
        from brigade.train.distributed.ranks import run_to_the_end

        at = sys.argv.index("--count")
        run_to_the_end(lambda: count(Path(sys.argv[at + 1]), sys.argv[at + 2 :]))
    else:
        main()
