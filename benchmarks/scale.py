"""What grows with hosts, rows, steps and parameters, and how fast: CPU seconds, memory, and what a checkpoint blocks.

    python -m benchmarks.scale             # -> benchmarks/results/scale.jsonl, docs/evidence/scale.md; some minutes
    python -m benchmarks.scale rows        # only this curve; the others keep their rows

hosts: `check --full --dry-run`; rows: `prepare` with as many processes as there are cores; steps: the trainer_state.json of a
checkpoint, after as many logged lines; parameters: the first and the second checkpoint of a run on two ranks. Commands are
whole, Python's own start included; memory is the largest process's.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from . import pages, scale_parameters

RESULTS, PAGE = pages.RESULTS / "scale.jsonl", pages.EVIDENCE / "scale.md"
HOSTS, ROWS, LINES = (1000, 3000, 10000), (10_000, 30_000, 90_000), (2000, 6000, 20_000)
BETWEEN = 100  # lines that are logged between two checkpoints


def command(words: list[str], cache: Path) -> pages.Row:
    """Run a command of Brigade. Returns its CPU seconds, those of its processes included, and the largest one's memory in MiB."""
    environment = os.environ | {"BRIGADE_CACHE": str(cache), "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "brigade", *words],
            cwd=pages.REPOSITORY,
            env=environment,
            stdout=output,
            stderr=output,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(output.read().decode()[-2000:])
    return {"cpu_s": round(used.ru_utime + used.ru_stime, 2), "mib": round(used.ru_maxrss / 1024)}


def hosts(folder: Path) -> Iterator[pages.Row]:
    for size in HOSTS:
        file = folder / "hosts"
        file.write_text("".join(f"node{number} slots=8\n" for number in range(size)))
        yield {"size": size} | command(["check", "--hostfile", str(file), "--full", "--dry-run"], folder / "cache")


def rows(folder: Path) -> Iterator[pages.Row]:
    from brigade.train.data import builtin

    lines = builtin.TRAIN.read_text().splitlines(keepends=True)
    for size in ROWS:
        file = folder / f"{size}.jsonl"
        with file.open("w") as out:
            out.writelines(lines[number % len(lines)] for number in range(size))
        words = ["prepare", "recipes/tiny/full.yaml", "--dataset_name", "", "--train_file", str(file)]
        yield {"size": size} | command(words, folder / "cache")


def steps(folder: Path) -> Iterator[pages.Row]:
    from transformers import TrainerState

    from brigade.train.upstream.checkpoint_files import StateFile

    file, state = StateFile(), TrainerState()
    for size in LINES:
        while len(state.log_history) < size:
            step = len(state.log_history)
            state.log_history.append({f"figure_{number}": step / (number + 1) for number in range(20)} | {"step": step})
            if step % BETWEEN == 0:
                file.write(state, folder / "ours.json")
        row: pages.Row = {"size": size}
        writes: dict[str, Callable[..., None]] = {"cpu_s": file.write, "theirs_s": TrainerState.save_to_json}
        for name, write in writes.items():
            began = time.process_time()
            write(state, folder / name)
            row[name] = round(time.process_time() - began, 3)
        yield row | {"mib": round((folder / "cpu_s").stat().st_size / 2**20, 1)}


CURVES: dict[str, Callable[[Path], Iterator[pages.Row]]] = {
    "hosts": hosts,
    "rows": rows,
    "steps": steps,
    "parameters": scale_parameters.measure,
}


# ---- the page --------------------------------------------------------------------------------------------------------
COLUMNS = {  # curve -> {a row's key: its column}
    "hosts": {"size": "hosts", "cpu_s": "CPU seconds", "mib": "MiB"},
    "rows": {"size": "rows", "cpu_s": "CPU seconds", "mib": "MiB"},
    "steps": {
        "size": "lines",
        "cpu_s": "CPU seconds",
        "theirs_s": "as Transformers writes it",
        "mib": "MiB of the file",
    },
    "parameters": {
        "millions": "million parameters",
        "strategy": "strategy",
        "start_s": "s to the first step",
        "start_cpu_s": "CPU s",
        "gib": "GiB of a checkpoint",
        "through": "the first goes through",
        "save_1_s_per_gib": "blocks, s/GiB",
        "save_2_s_per_gib": "the second",
        "save_1_cpu_s_per_gib": "CPU s/GiB",
        "save_2_cpu_s_per_gib": "the second's",
    },
}


def tables() -> dict[str, str]:
    """Return the table of each curve."""
    found: dict[str, list[pages.Row]] = {}
    for row in pages.read(RESULTS):
        found.setdefault(row["curve"], []).append(row)
    texts = {}
    for curve, measured in found.items():
        columns = COLUMNS[curve]
        lines = [[f"{row[key]:,}" if isinstance(row[key], int) else row[key] for key in columns] for row in measured]
        where = measured[-1]
        note = f"On {where['machine']}; {where['versions']}."
        texts[curve] = f"{pages.markdown(columns.values(), lines)}\n\n{note}"
    return texts


def main() -> None:
    parser = pages.command_line(__doc__)
    parser.add_argument("curves", nargs="*", choices=[*CURVES, []], help="default: all")
    wanted = parser.parse_args().curves or list(CURVES)
    before = pages.read(RESULTS) if RESULTS.exists() else []
    measured: dict[str, list[pages.Row]] = {curve: [row for row in before if row["curve"] == curve] for curve in CURVES}
    for curve in wanted:
        measured[curve] = []
        with tempfile.TemporaryDirectory(dir=Path.home()) as folder:  # on a disk: /tmp may be memory
            for row in CURVES[curve](Path(folder)):
                print(curve, row, flush=True)
                measured[curve].append({"curve": curve} | row | pages.where())
        pages.save(RESULTS, [row for curve in CURVES for row in measured[curve]])
    pages.write(PAGE, tables())


if __name__ == "__main__":
    main()
