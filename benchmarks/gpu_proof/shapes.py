"""Six shapes on one GPU, three models by two methods: tokens per second, MFU, and memory against what `plan` says of them.

The runs are those of benchmarks/gpu.py, whose rows they append to the part's own file.
"""

import json
import subprocess
import sys
from typing import Any

from .parts import REPOSITORY
from .subject import Subject, command

SHAPES = [(model, method) for model in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b") for method in ("full", "lora")]
FIGURES = (
    "tokens_per_second",
    "mfu",
    "mfu_of_work_done",
    "step_time",
    "peak_memory_gib",
    "reserved_memory_gib",
    "last_loss",
)
FEWEST = 20  # seconds for which a run is worth a start


def main() -> None:
    subject = Subject(__doc__)
    for model, method in SHAPES[:1] if subject.small else SHAPES:
        what, results = f"{model} {method}", subject.work / f"{model}-{method}.jsonl"
        words = [
            "-m",
            "benchmarks.gpu",
            "--only",
            model,
            method,
            "base",
            "--results",
            str(results),
            "--no-page",
            "--again",
        ]
        words += [
            "--work",
            str(subject.work.parent / "models"),
            *(["--tiny", "--steps", "10"] if subject.small else []),
        ]
        again = command(words)
        if subject.left < FEWEST:
            subject.row(what, {}, "not begun: the part's time was over", again)
            continue
        try:
            done = subprocess.run(
                [sys.executable, *words], cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                timeout=subject.left - 5,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            subject.row(what, {}, "stopped: the part's time was over", again)
            continue
        rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        if not rows:
            subject.row(what, {}, f"exit code {done.returncode}: {done.stdout.strip()[-300:]}", again)
            continue
        judge(subject, what, rows[-1], again)


def judge(subject: Subject, what: str, row: dict[str, Any], again: str) -> None:
    """Leave a row with what was measured, and beside it what the planner's formulas estimate for the same micro-batches."""
    figures = {key: row[key] for key in FIGURES if row.get(key) is not None}
    prediction = row.get("prediction") or {}
    predicted = prediction.get("predicted", {})
    if row["status"] != "ok":
        subject.row(what, figures, f"{row['status']}: {row['reason']}", again)
        return
    shortfall = ""
    if predicted:
        measured = prediction["measured"]["allocated_gib"]
        low, high = predicted["allocated_between"]
        figures |= {"allocated_gib": measured, "planned_gib": predicted["allocated_gib"], "planned_between": [low, high],
                    "planned_step_time": predicted["step_time"]}  # fmt: skip
        if measured is not None and measured > high:  # less than planned does no harm
            shortfall = f"{measured:.2f} GiB allocated, and the plan's 80 % interval ends at {high:.2f}"
    else:
        figures["no_plan"] = prediction.get("none", "the run left no prediction")
    subject.row(what, figures, shortfall, again)


if __name__ == "__main__":
    main()
