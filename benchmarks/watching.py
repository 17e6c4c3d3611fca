"""What watching a run costs it: microseconds that heartbeats and the watching thread add to a step.

    python -m benchmarks.watching            # measures -> benchmarks/results/watching.csv, the table in docs/evidence/watching.md
    python -m benchmarks.watching --parts    # only the parts, in seconds

One process trains a tiny model as a launched rank does. Blocks of BLOCK steps with the heartbeat and the thread alternate with
blocks without either; which goes first alternates too. The figure is the mean over pairs of blocks of the difference of their
medians, with its 95 % interval (t). The other rows are processor time of the parts: one switch of phase, one look of the thread,
and both as often as a step of STEP seconds has them.
"""

import itertools
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import pages
from benchmarks.pages import EVIDENCE, markdown
from brigade.train.distributed.process import this_process
from brigade.train.host.cluster import World

RESULTS = pages.RESULTS / "watching.csv"
PAGE = EVIDENCE / "watching.md"
BLOCK, WARM_UP = 20, 40  # steps
STEP = 0.3  # seconds of a step that the figures are compared with
SWITCHES = 4  # of phase in a step of one micro-batch: data, forward, backward, optimizer
PAIRS = 60
T = 2.0  # Student's t for 95 % and 60 pairs


def steps(pairs: int) -> list[float]:
    """Microseconds per step that watching adds, one figure per pair of blocks."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    from transformers import TrainerCallback

    import train
    from brigade.train.distributed import ranks
    from brigade.train.watch import watch_thread
    from testing import runs

    enter = this_process.heartbeat.enter
    taken: list[float] = []

    class Alternate(TrainerCallback):
        """Before the first step of a block: watch it, or not."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            taken.append(time.perf_counter())
            block = (state.global_step - WARM_UP) // BLOCK
            watched = block < 0 or is_watched(block)
            this_process.heartbeat.enter = enter if watched else lambda phase, step=None: None  # type: ignore[method-assign]
            (watch,) = (thread for thread in threading.enumerate() if isinstance(thread, watch_thread.Watch))
            watch.look = (lambda: watch_thread.Watch.look(watch)) if watched else lambda: None  # type: ignore[method-assign]

    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(one, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ranks.free_port()))
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    count = WARM_UP + 2 * pairs * BLOCK
    with tempfile.TemporaryDirectory() as folder:
        flags = runs.write_inputs(Path(folder) / "inputs")
        flags += [
            "--max_steps",
            str(count + 1),
            "--eval_steps",
            "null",
            "--eval_answers",
            "0",
            "--logging_steps",
            "100000",
        ]
        train.main([*flags, "--output_dir", f"{folder}/run"], callbacks=(Alternate(),))
    seconds = [after - before for before, after in itertools.pairwise(taken)][WARM_UP:count]
    blocks = [statistics.median(seconds[at : at + BLOCK]) for at in range(0, len(seconds), BLOCK)]
    added = []
    for first in range(0, 2 * pairs, 2):
        watched, bare = (blocks[first], blocks[first + 1]) if is_watched(first) else (blocks[first + 1], blocks[first])
        added.append(1e6 * (watched - bare))
    return added


def is_watched(block: int) -> bool:
    """Every second block, and which one of a pair alternates: a machine that grows slower counts for neither."""
    return block % 4 in (0, 3)


def switch() -> list[float]:
    """Microseconds of one switch of phase; the mean of many, several times."""
    from brigade.train.distributed import heartbeat

    found, count = [], 20_000
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(count):
            this_process.heartbeat.enter(heartbeat.FORWARD)
        found.append(1e6 * (time.perf_counter() - began) / count)
    return found


def look() -> list[float]:
    """Microseconds of processor time of one look of the thread, a writing of its file every fifth time included."""
    from brigade.train.watch.watch_thread import Watch

    found = []
    with tempfile.TemporaryDirectory() as folder:
        world, strategy = World(0, 0, 2, 2, "node1", "torchrun"), SimpleNamespace(replicas=1)
        watch = Watch(SimpleNamespace(world=world, strategy=strategy, directory=Path(folder)))  # type: ignore[arg-type]
        for _ in range(20):
            began = time.thread_time()
            for number in range(100):
                watch.observer._looked = 0.0
                watch.written = time.monotonic() if number % 5 else 0.0
                watch.look()
            found.append(1e6 * (time.thread_time() - began) / 100)
    return found


def whole() -> list[float]:
    """Microseconds of processor time in a step of STEP seconds: its switches, and its share of the thread's looks."""
    return [SWITCHES * one + STEP * other for one, other in zip(switch(), look(), strict=True)]


PARTS = {
    "a switch of phase": switch,
    "a look of the thread, once a second": look,
    f"both in a step of {STEP} s": whole,
}
RUN = {"a step of a tiny model, with watching minus without": lambda: steps(PAIRS)}


def measure(parts: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for what, part in parts.items():
        found = part()
        middle = statistics.fmean(found)
        half = T * statistics.stdev(found) / len(found) ** 0.5
        figures = {"mean": middle, "low": middle - half, "high": middle + half}
        rows.append(
            {"what": what, **{name: f"{value:.2f}" for name, value in figures.items()}, "figures": str(len(found))}
        )
        print(rows[-1], flush=True)
    return [row | pages.where() for row in rows]


def table(rows: list[dict[str, str]]) -> str:
    lines = []
    for row in rows:
        share = 100 * float(row["high"]) / (1e6 * STEP)
        interval = f"{float(row['low']):,.2f} to {float(row['high']):,.2f}"
        lines.append([row["what"], f"{float(row['mean']):,.2f} µs", f"{interval} µs", f"{max(0.0, share):.4f} %"])
    head = ["what", "mean", "95 % interval", f"its upper end, of a step of {STEP} s"]
    return f"{markdown(head, lines)}\n\n{rows[0]['machine']}; {rows[0]['versions']}."


def tables() -> dict[str, str]:
    return {"watching": table(pages.read(RESULTS))}


def main() -> None:
    parser = pages.command_line(__doc__)
    parser.add_argument("--parts", action="store_true", help="measure only the parts; the run's row stays")
    options = parser.parse_args()
    rows = measure(PARTS)
    of_run = [row for row in pages.read(RESULTS) if row["what"] in RUN] if RESULTS.exists() else []
    pages.save(RESULTS, rows + (of_run if options.parts else measure(RUN)))
    pages.write(PAGE, tables())


if __name__ == "__main__":
    main()
