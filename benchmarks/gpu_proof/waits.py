"""How often each rank's host waits for its device in a step, by the line that waits (testing/waits.py)."""

import os
import shutil
from pathlib import Path
from typing import Any

from testing import runs, waits

from .subject import Subject, command, in_ranks, torchrun

COUNT = "--count"  # which this module's ranks are started with
STEPS, FIRST, ACCUMULATION = 6, 3, 4  # waits count from step FIRST on


def main() -> None:
    subject = Subject(__doc__)
    shared = subject.inputs(subject.work)
    micro = max(1, runs.GLOBAL_BATCH // subject.ranks // ACCUMULATION)
    for name in subject.strategies:
        what, found, output = f"{name}, {subject.on}", subject.work / f"{name}.waits", subject.work / name
        shutil.rmtree(found, ignore_errors=True)
        words = [*shared, *subject.flags(name, output), "--max_steps", str(STEPS), "--logging_steps", "99"]
        words += ["--per_device_train_batch_size", str(micro)]
        child = torchrun(subject.ranks, "-m", "benchmarks.gpu_proof.waits", COUNT, str(found), *words)
        again = command(child)
        failed, late = ("", subject.no_time) if subject.no_time else subject.run(child, name)
        if failed or late:
            subject.row(what, {}, failed, again, left_out=late)
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
    if not in_ranks(COUNT, count):
        main()
