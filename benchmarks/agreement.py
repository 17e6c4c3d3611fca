"""What it costs to compare what ranks hold alike, side by side with a step and a checkpoint of the same run.

python -m benchmarks.agreement                 # 2 ranks of this host, the tiny recipe
python -m benchmarks.agreement smollm2-135m    # another recipe, with fewer steps: some 12 GiB of memory and of disk
"""

import json
import os
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
from testing.ranks import REPOSITORY, run_ranks

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
        done = run_ranks("benchmarks.agreement", folder, recipe, *strategies, ranks=2, timeout=3600)
        assert done.returncode == 0, done.stderr
        for strategy in strategies:
            taken: Taken = json.loads(Path(folder, f"{strategy}.json").read_text())
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


def _work(folder: Path, recipe: str, *strategies: str) -> None:
    import train

    checked, saved = Agreement.check, Checkpoints.save
    for strategy in strategies:
        taken: Taken = {"step": [], "save": [], "check": []}
        Agreement.check, Checkpoints.save = checked, saved  # type: ignore[method-assign]
        _timed(Agreement, "check", taken["check"])
        _timed(Checkpoints, "save", taken["save"])
        flags = ["--recipe", str(REPOSITORY / f"recipes/{recipe}/full.yaml"), *parity.STRATEGIES[strategy]]
        flags += (
            f"--max_steps {STEPS} --warmup_steps 0 --eval_steps null --save_steps {SAVED} --save_total_limit 1".split()
        )
        flags += ["--report_page", "false"]
        trainer = train.main([*flags, "--output_dir", str(folder / strategy)], callbacks=(Clock(taken["step"]),))
        runs.forget(trainer)
        if int(os.environ["RANK"]) == 0:
            (folder / f"{strategy}.json").write_text(json.dumps(taken))
        ranks.barrier()
        shutil.rmtree(folder / strategy, ignore_errors=True)  # room for the next one's checkpoints


if __name__ == "__main__":
    if "RANK" in os.environ:
        ranks.run_to_the_end(lambda: _work(Path(sys.argv[1]), *sys.argv[2:]))
    main()
