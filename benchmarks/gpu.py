"""Full fine-tuning and LoRA on one NVIDIA GPU: tokens per second, MFU and memory, with and without each kernel.

    python -m benchmarks.gpu                                  # all there is to do, then docs/evidence/gpu.md
    python -m benchmarks.gpu --only qwen3-0.6b all liger      # MODEL METHOD OPTION, `all` for any; again for more
    python -m benchmarks.gpu --minutes 8                      # begin no run after eight minutes; the same command goes on
    python -m benchmarks.gpu --list                           # what it would do
    python -m benchmarks.gpu --draw                           # docs/evidence/gpu.md from the rows that are there

Every run is train.py in a process of its own. A row is appended to benchmarks/results/gpu.jsonl after each; what the
same code, versions and device have measured is not measured again. Needs some 60 GB of disk for the 8B model.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import yaml

from benchmarks import gpu_models, gpu_tables, pages, peers
from benchmarks.gpu_plan import METHODS, STEPS, WARM_UP, Job, flags_of, plan, urgency
from benchmarks.pages import REPOSITORY, Row
from testing.command_line import as_flags

RESULTS = pages.RESULTS / "gpu.jsonl"
WORK = REPOSITORY / "outputs" / "gpu"
LIMIT = 540  # seconds of one run, start and saving included
CODE = ("train.py", "brigade/**/*.py", "ds_configs/*.json", "benchmarks/gpu*.py", "benchmarks/peers_data.py")


# ---- one row -----------------------------------------------------------------------------------------------------------
def run_process(command: list[str], log: Path, **variables: str) -> tuple[str, str]:
    """("ok", the output), or the status and reason of a row that came to nothing."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path} | variables
    with log.open("w") as out:
        try:
            code = subprocess.run(
                command, cwd=REPOSITORY, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT
            ).returncode
        except subprocess.TimeoutExpired:
            return "failed", f"stopped after {LIMIT} seconds"
    text = log.read_text(errors="replace")
    return ("ok", text) if code == 0 else why(code, text)


def why(code: int, text: str) -> tuple[str, str]:
    """Status and reason of a process that ended with `code` after it wrote `text`.

    refused: train.py's own check says what device or installation lack; out of memory: the GPU's; failed: all else
    """
    told = re.search(r"^error\b.*\n  (.*)\n  cure: (.*)", text, re.MULTILINE)
    if code == 2 and told:
        return "refused", f"{told[1]} ({told[2]})"
    memory = re.findall(r"^.*(?:OutOfMemoryError|out of memory).*$", text, re.MULTILINE)
    if memory:
        return "out of memory", memory[-1].strip()[:300]
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no word")
    errors = re.findall(r"^\S*(?:Error|Exception)\b.*$", text, re.MULTILINE)
    return "failed", f"exit code {code}: {(errors or [last])[-1][:300]}"


def train(job: Job, inputs: Row, work: Path, tiny: bool, steps: int, warm_up: int) -> Row:
    """One run of train.py: its settings, status and figures."""
    flags = flags_of(job, tiny)
    model, output = inputs["models"][job.model], work / "run"
    row: Row = {"status": "ok", "reason": "", "settings": flags, "warm_up": warm_up}
    recipe = peers.recipe(inputs["data"] | {"model": model["folder"]}, steps)
    (work / "gpu.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    words = as_flags(recipe=str(work / "gpu.yaml"), max_steps=warm_up + steps, **flags)
    if flags["use_liger_kernel"] == "true" and (lacking := without_liger(words)):
        return row | {"status": "refused", "reason": lacking}
    shutil.rmtree(output, ignore_errors=True)  # a finished run would not run again
    command = [sys.executable, "train.py", *words, "--output_dir", str(output)]
    row["status"], row["reason"] = run_process(command, work / f"{'-'.join(job)}.log")
    if row["status"] == "ok":
        try:
            history = json.loads((output / "trainer_state.json").read_text())["log_history"]
            row |= figures(history, model["shape"], job, inputs["where"]["device"], steps, warm_up)
            row["prediction"] = predicted(output)
        except (OSError, KeyError, ValueError, RuntimeError) as error:  # a run without a whole log is one row, no more
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
    shutil.rmtree(output, ignore_errors=True)  # of the 8B model up to 33 GB
    return row


def without_liger(words: list[str]) -> str:
    """Why train.py would go without Liger's kernels and say so in one word of its table; "" where it uses them."""
    from brigade.train.engines import kernels
    from brigade.train.recipe import flags

    return kernels.choose_liger(flags.load(words))[1].removeprefix("off: ")


def predicted(output: Path) -> Row | None:
    """Return what run.yaml says of the planner's estimate and of what the first ten steps took; None of a shorter run."""
    record = yaml.safe_load((output / "run.yaml").read_text())
    return record["run"].get("prediction")


def figures(history: list[Row], shape: Row, job: Job, device: str, steps: int, warm_up: int) -> Row:
    """What the log of a whole run says of its measured steps."""
    entries = [entry for entry in history if "loss" in entry]
    found = peers.from_log(entries[warm_up - 1 :], steps)
    adapters = gpu_models.adapter_parameters(shape, int(METHODS["lora"]["lora_r"])) if job.method == "lora" else None
    found |= gpu_models.rates(entries[warm_up:], shape, adapters, device)
    found |= {"parameters": shape["parameters"], "trained_parameters": adapters or shape["parameters"], "reason": ""}
    if not all(math.isfinite(entry["loss"]) for entry in entries):
        found |= {"status": "failed", "reason": "the loss is not a number"}
    return found


def compare(job: Job, work: Path) -> Row:
    """One attention, packed against unpacked, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu_attention", job.model, job.option]
    status, text = run_process(command, work / f"{'-'.join(job)}.log")
    return said(text) if status == "ok" else {"status": status, "reason": text}


def said(text: str) -> Row:
    """The JSON that a process of ours printed last, among the libraries' notes."""
    return json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("{")))


def tables() -> dict[str, str]:
    return gpu_tables.tables(read_rows(RESULTS))


# ---- all rows ----------------------------------------------------------------------------------------------------------
def code() -> str:
    """A hash of all that decides what a row says; a page writer's changes leave it as it is."""
    files = [path for pattern in CODE for path in sorted(REPOSITORY.glob(pattern)) if path.name != "gpu_tables.py"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:12]


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file; none where there is no file. Raises ValueError for a line that is no row."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is no row ({error.msg}): delete the line") from None
    return rows


def identity(row: Row) -> str:
    """What has to be the same for a row to hold still."""
    keys = (*Job._fields, "tiny", "steps_asked", "device", "versions", "code")
    return json.dumps([row.get(key) for key in keys], sort_keys=True)


def measure(jobs: list[Job], options: argparse.Namespace) -> list[Row]:
    """Run what is not in the results file yet, and append to it; returns the new rows. Raises RuntimeError when not even
    the inputs can be made."""
    from brigade.train.run.versions import git_commit

    began = time.monotonic()
    options.work.mkdir(parents=True, exist_ok=True)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    models = dict.fromkeys(job.model for job in jobs if job.method in METHODS)
    command = [sys.executable, "-m", "benchmarks.gpu_models", str(options.work), *models]
    status, text = run_process(command + ["--tiny"] * options.tiny, options.work / "inputs.log")
    if status != "ok":
        raise RuntimeError(f"the models and the data could not be made: {text}")
    inputs = said(text)
    shared = inputs["where"] | {
        "tiny": options.tiny,
        "steps_asked": options.steps,
        "code": code(),
        "commit": git_commit(),
        "data": {key: inputs["data"].get(key) for key in ("sha256", "dialogues")},
    }
    done = {identity(row) for row in read_rows(options.results) if row["status"] != "failed" and not options.again}
    due = sorted((job for job in jobs if identity(shared | job._asdict()) not in done), key=urgency)
    print(f"{inputs['where']['device']}: {len(due)} of {len(jobs)} rows to measure", flush=True)
    rows: list[Row] = []
    for number, job in enumerate(due, 1):
        if time.monotonic() - began > options.minutes * 60:
            print(f"{options.minutes:g} minutes are over: the same command measures the other {len(due) - len(rows)}")
            break
        row = (
            compare(job, options.work)
            if job.method == "attention"
            else train(job, inputs, options.work, options.tiny, options.steps, 1 if options.tiny else WARM_UP)
        )
        rows.append(
            {"measured": datetime.now().astimezone().isoformat(timespec="seconds")} | shared | job._asdict() | row
        )
        with options.results.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(
            f"{time.strftime('%H:%M:%S')} {number}/{len(due)} {' '.join(job)}: {gpu_tables.summary(rows[-1])}",
            flush=True,
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = pages.command_line(__doc__)
    parser.add_argument("--only", nargs=3, action="append", metavar=("MODEL", "METHOD", "OPTION"), default=[])
    parser.add_argument("--steps", type=int, help=f"measured steps of a run (default: {STEPS})")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row after so many")
    parser.add_argument("--results", type=Path, default=RESULTS, help="rows are appended to it")
    parser.add_argument("--work", type=Path, default=WORK, help="models, data and logs (default: outputs/gpu)")
    parser.add_argument("--tiny", action="store_true", help="the same code with tiny shapes, on any machine; no page")
    parser.add_argument("--again", action="store_true", help="measure also what the results file has")
    parser.add_argument("--no-page", action="store_true", help="leave docs/evidence/gpu.md as it is")
    parser.add_argument("--list", action="store_true", help="say what would be measured")
    parser.add_argument("--draw", action="store_true", help="measure nothing; the page from the rows that are there")
    options = parser.parse_args(argv)
    options.steps = (2 if options.tiny else STEPS) if options.steps is None else options.steps
    if options.steps < 1 or not options.minutes > 0:
        parser.error("--steps and --minutes: numbers above 0")
    options.work = (options.work / "tiny" if options.tiny else options.work).resolve()
    if options.results.is_dir():
        parser.error(f"--results {options.results} is a directory: name a file")
    try:
        jobs = plan(options.only, options.tiny)
        if options.list:
            gpu_tables.show_plan(jobs, lambda job: flags_of(job, options.tiny))
            return 0
        if not options.draw:
            if not options.tiny and not gpu_models.has_gpu():
                parser.error("this host has no NVIDIA GPU that torch can use; --tiny runs the same code without one")
            measure(jobs, options)
        if not (options.tiny or options.no_page):
            pages.write(gpu_tables.PAGE, gpu_tables.tables(read_rows(options.results)))
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
