"""How often each rank's host waits for its device in a step, by the line that waits (testing/waits.py)."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from testing import parity, runs, waits

from .subject import Subject, command, run

STEPS, FIRST, ACCUMULATION = 6, 3, 4  # waits count from step FIRST on


def main() -> None:
    subject = Subject(__doc__)
    shared = subject.inputs(subject.work)
    micro = max(1, runs.GLOBAL_BATCH // subject.ranks // ACCUMULATION)
    for name in ("zero3",) if subject.small else ("zero3", "fsdp2", "ddp"):
        what, found, output = f"{name}, {subject.on}", subject.work / f"{name}.waits", subject.work / name
        shutil.rmtree(found, ignore_errors=True)
        words = [*shared, *parity.STRATEGIES[name], "--output_dir", str(output), "--fresh", "--bf16", "true"]
        words += ["--max_steps", str(STEPS), "--eval_steps", "99", "--logging_steps", "99", "--max_eval_samples", "1"]
        words += ["--per_device_train_batch_size", str(micro)]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={subject.ranks}"]
        child = [*launcher, "-m", "benchmarks.gpu_proof.waits", "--count", str(found), *words]
        again = command(child)
        if subject.no_time:
            subject.row(what, {}, left_out=subject.no_time, command=again)
        elif failed := run([sys.executable, *child], subject.work / f"{name}.log", subject.left - 5):
            subject.row(what, {}, failed, again)
        else:
            judge(subject, what, waits.read(found, subject.ranks), again)


def judge(subject: Subject, what: str, report: dict[str, Any], again: str) -> None:
    """Leave the row of a strategy; it falls short where lines of ours wait in each micro-step."""
    if report["none"]:
        subject.row(what, {"not_counted": report["none"]}, "", again)
        return
    every, micro_steps = [group["waits"] for group in report["ranks"]], report["micro_steps"]
    figures = {  # of the rank that waits most
        "per_step": max(waits.total(of_rank, micro_steps) for of_rank in every),
        "ours_per_step": max(waits.total(waits.of_ours(of_rank), micro_steps) for of_rank in every),
        "micro_steps": micro_steps,
        "places": report["ranks"],
    }
    repeated = waits.in_each_micro_step(report)
    shortfall = "; ".join(
        dict.fromkeys(f"{each['line']} waits {each['micro-step']:g} times in each micro-step" for each in repeated)
    )
    subject.row(what, figures, shortfall, again)


def count(into: Path, flags: list[str]) -> None:
    """Train with these flags in a rank, and write which lines waited how often in the steps from FIRST on, into a folder."""
    import train

    counted = waits.Waits()
    train.main(flags, callbacks=(counted.callback(FIRST),))
    counted.write(into, int(os.environ.get("RANK", "0")))


if __name__ == "__main__":
    if "--count" in sys.argv:
        from brigade.train.distributed.ranks import run_to_the_end

        at = sys.argv.index("--count")
        run_to_the_end(lambda: count(Path(sys.argv[at + 1]), sys.argv[at + 2 :]))
    else:
        main()
