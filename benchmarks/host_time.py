"""CPU time that Python uses in a micro-step and an optimizer step: a plain loop, Transformers' Trainer, TRL's and ours.

    python -m benchmarks.host_time                 # measures -> benchmarks/results/host_time.jsonl, docs/evidence/host-time.md
    python -m benchmarks.host_time ZeRO-3          # only this strategy; the others keep their rows

The model is a Llama of 32 layers with hardly any arithmetic: what is left is the host's time, for which a GPU waits. The four
systems compute with the same model, optimizer, clipping and batches, in processes of their own that take their steps in turn
(host_time_worker.py). Figures are medians of STEPS steps. Calls are those of Python's functions, and of C's from Python; they do
not depend on how busy a machine is. TRL is that of benchmarks/peers.py.
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from testing.ranks import run_ranks

from . import pages, peers
from .host_time_worker import ACCUMULATION, STRATEGIES, SYSTEMS, WARM_UP
from .pages import EVIDENCE, RESULTS, Row

PATH, PAGE = RESULTS / "host_time.jsonl", EVIDENCE / "host-time.md"
STEPS, COUNTED = 25, 5  # steps that are measured, and whose calls are counted; each a multiple of LOGGED
NAMES = {
    "plain": "plain loop",
    "transformers": "Transformers' Trainer",
    "trl": "TRL's SFTTrainer",
    "ours": "Brigade",
}


def measure(strategy: str, systems: list[str], count: bool = False) -> dict[str, dict[str, float]]:
    """Return of each system {"micro", "step"}: CPU microseconds, or calls where `count` is true, of a micro-step, and
    of what a step takes beyond its ACCUMULATION micro-steps; medians of all measured steps.

    Raise RuntimeError where one of them fails.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    packages = peers.PEERS / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    with tempfile.TemporaryDirectory() as folder:
        for number in range(len(systems)):
            os.mkfifo(Path(folder) / f"turn-{number}")
        steps = WARM_UP + (COUNTED if count else STEPS)
        job = {
            "systems": systems,
            "strategy": strategy,
            "steps": steps,
            "folder": folder,
            "peers": str(packages),
            "count": count,
        }
        done = run_ranks("benchmarks.host_time_worker", json.dumps(job), ranks=len(systems), timeout=1800)
        if done.returncode:
            said = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            raise RuntimeError(f"{strategy} ended with {done.returncode}:\n{said}")
        read = {system: json.loads((Path(folder) / f"{system}.json").read_text()) for system in systems}
    found = {}
    for system, measured in read.items():
        micro, whole = statistics.median(measured["micro"]), statistics.median(measured["whole"])
        found[system] = {"micro": round(micro), "step": round(whole - ACCUMULATION * micro)}
    return found


def rows(strategy: str) -> list[Row]:
    """Measure all systems under a strategy; one row for each."""
    time, calls = measure(strategy, list(SYSTEMS)), measure(strategy, list(SYSTEMS), count=True)
    return [
        {"strategy": strategy, "system": system}
        | {f"{part}_us": time[system][part] for part in ("micro", "step")}
        | {f"{part}_calls": calls[system][part] for part in ("micro", "step")}
        | pages.where()
        for system in SYSTEMS
    ]


# ---- the page --------------------------------------------------------------------------------------------------------
def _whole(row: Row, unit: str) -> int:
    """A step of ACCUMULATION micro-steps."""
    return ACCUMULATION * row[f"micro_{unit}"] + row[f"step_{unit}"]


def tables() -> dict[str, str]:
    """Return the table of time and that of calls."""
    found = {(row["strategy"], row["system"]): row for row in pages.read(PATH)}
    texts = {}
    for unit, name in (("us", "time"), ("calls", "calls")):
        lines = []
        for (strategy, system), row in found.items():
            ratio = _whole(row, unit) / _whole(found[strategy, "plain"], unit)
            figures = (f"{row[f'{part}_{unit}']:,}" for part in ("micro", "step"))
            lines.append([strategy, NAMES[system], *figures, f"{ratio:.2f}"])
        what = f"a step of {ACCUMULATION} micro-steps, times the plain loop's"
        texts[name] = pages.markdown(["strategy", "", "micro-step", "optimizer step", what], lines)
    row = next(iter(found.values()))
    texts["time"] += f"\n\nMicroseconds, on {row['machine']}; {row['versions']}."
    return texts


def main() -> None:
    parser = pages.command_line(__doc__)
    parser.add_argument("strategies", nargs="*", choices=[*STRATEGIES, []], help="default: all")
    options = parser.parse_args()
    peers.prepare_peers()
    before = pages.read(PATH) if PATH.exists() else []
    measured = {strategy: [row for row in before if row["strategy"] == strategy] for strategy in STRATEGIES}
    for strategy in options.strategies or STRATEGIES:
        measured[strategy] = rows(strategy)
        print(*measured[strategy], sep="\n", flush=True)
        pages.save(PATH, [row for strategy in STRATEGIES for row in measured[strategy]])
    pages.write(PAGE, tables())


if __name__ == "__main__":
    main()
