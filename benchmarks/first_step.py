"""Seconds from `python train.py` to the end of the first step, of two checkouts side by side.

    git worktree add --detach ../before COMMIT     # with a .venv of its own, or a link to this one's
    python -m benchmarks.first_step ../before .    # five pairs; --pairs N; further flags are train.py's

The runs alternate, so that whatever else the machine does meets both. Each trains one step of the default recipe in one process,
after one run of each that fills the caches and is not counted. CPU seconds are those of the process when its first step is
logged; they vary less than seconds of the clock where others work on the machine.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

SHORT = ["--max_steps", "1", "--warmup_steps", "0", "--eval_answers", "0", "--max_eval_samples", "8", "--fresh"]
TICKS = os.sysconf("SC_CLK_TCK")


def first_step(checkout: Path, flags: list[str]) -> tuple[float, float]:
    """(seconds by the clock, seconds of CPU) until the line of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        python, output = str(checkout / ".venv/bin/python"), ["--output_dir", f"{folder}/run"]
        command = [python, "-u", "train.py", *SHORT, "--logging_steps", "1", *output, *flags]
        began, said = time.perf_counter(), ""
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        run = subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        with run:
            assert run.stdout
            for line in run.stdout:
                said += line
                if line.startswith("step 1/1 ") and "grad norm" in line:
                    seconds = time.perf_counter() - began
                    fields = Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()
                    run.kill()
                    return seconds, (int(fields[11]) + int(fields[12])) / TICKS
    raise RuntimeError(f"{checkout}: the run ended before its first step:\n{said[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    options, flags = parser.parse_known_args()
    checkouts = [options.before.resolve(), options.after.resolve()]
    for checkout in checkouts:
        if not (checkout / ".venv/bin/python").exists():
            parser.error(f"{checkout} has no .venv/bin/python: name checkouts with an environment (make setup)")
    for checkout in checkouts:
        first_step(checkout, flags)
    taken: list[list[tuple[float, float]]] = [[], []]
    for pair in range(options.pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            taken[which].append(first_step(checkouts[which], flags))
        print(
            f"pair {pair + 1}: " + ", ".join("{:.1f} s, {:.1f} of CPU".format(*one[-1]) for one in taken),
            file=sys.stderr,
        )
    print(f"| medians of {options.pairs} pairs | before | after | after / before |\n|---|--:|--:|--:|")
    for column, what in enumerate(("seconds to the first step", "CPU seconds")):
        before, after = (median(one[column] for one in runs) for runs in taken)
        print(f"| {what} | {before:.1f} | {after:.1f} | {after / before:.2f} |")


if __name__ == "__main__":
    main()
