"""What it costs to compare what ranks hold alike, side by side with a step and a checkpoint of the same run.

python -m benchmarks.agreement                 # 2 ranks of this host, the tiny recipe
python -m benchmarks.agreement smollm2-135m    # another recipe, with fewer steps: some 12 GiB of memory and of disk
"""

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from transformers import TrainerCallback

from brigade.train.distributed import ranks
from brigade.train.step.agreement import Agreement
from brigade.train.step.checkpoints import Checkpoints
from testing import parity, runs
from testing.on_ranks import on_ranks
from testing.ranks import REPOSITORY

STRATEGIES = ("ddp", "zero2", "zero3", "fsdp2")
STEPS, SAVED = 14, 2  # five checkpoints are timed
Taken = dict[str, list[float]]


def main() -> None:
    print(
        "| strategy | step | checkpoint | comparison | of a step | of a checkpoint |",
        "|---|---|---|---|---|---|",
        sep="\n",
    )
    with tempfile.TemporaryDirectory() as folder:
        recipe, *strategies = sys.argv[1:] or ["tiny"]
        strategies = strategies or list(STRATEGIES)
        given = (folder, recipe, strategies)
        for strategy, taken in on_ranks(_taken, *given, ranks=2, timeout=3600)[0].items():
            # The first comparison finds out who holds what, and the second has the optimizer's states for the first time.
            step, save, check = (statistics.median(taken[key][2:]) for key in ("step", "save", "check"))
            print(
                f"| {strategy} | {1e3 * step:.0f} ms | {1e3 * save:.0f} ms | {1e3 * check:.1f} ms "
                f"| {check / step:.1%} | {check / save:.1%} |"
            )


class Clock(TrainerCallback):
    """Seconds of each step on this rank."""

    def __init__(self, taken: list[float]) -> None:
        self.taken, self.began = taken, 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.taken.append(time.perf_counter() - self.began)


def _timed(owner: type, method: str, taken: list[float]) -> None:
    plain = getattr(owner, method)

    def timed(self: object) -> None:
        began = time.perf_counter()
        plain(self)
        taken.append(time.perf_counter() - began)

    setattr(owner, method, timed)


def _taken(folder: str, recipe: str, strategies: list[str]) -> dict[str, Taken]:
    import train

    checked, saved = Agreement.check, Checkpoints.save
    found: dict[str, Taken] = {strategy: {"step": [], "save": [], "check": []} for strategy in strategies}
    for strategy, taken in found.items():
        Agreement.check, Checkpoints.save = checked, saved  # type: ignore[method-assign]
        _timed(Agreement, "check", taken["check"])
        _timed(Checkpoints, "save", taken["save"])
        flags = ["--recipe", str(REPOSITORY / f"recipes/{recipe}/full.yaml"), *parity.STRATEGIES[strategy]]
        flags += (
            f"--max_steps {STEPS} --warmup_steps 0 --eval_steps null --save_steps {SAVED} --save_total_limit 1".split()
        )
        flags += ["--report_page", "false"]
        trainer = train.main([*flags, "--output_dir", f"{folder}/{strategy}"], callbacks=(Clock(taken["step"]),))
        runs.forget(trainer)
        ranks.barrier()
        shutil.rmtree(Path(folder, strategy), ignore_errors=True)  # room for the next one's checkpoints
    return found


if __name__ == "__main__":
    main()
