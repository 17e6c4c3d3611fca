"""What a host has to hold: memory while a model loads, and the disk that a checkpoint takes, beside the formulas.

    python -m benchmarks.hosts           # measures -> benchmarks/results/hosts.csv; then: python -m benchmarks.planner

Each case is two steps of train.py on two ranks with a Llama of 174 million parameters that lies on disk in bf16, in files of
100 MB. Memory is what the processes own together (Anonymous and shared memory of /proc/PID/smaps_rollup, every 20 ms), from
before Transformers loads the model to its end, less what they held before; pages of the model's files that they map are counted
apart, for the system may drop them. Shards of ZeRO-3 and weights in 4 bits are made in that time, and here lie in the memory
measured, on a GPU in its own.
"""

import argparse
import contextlib
import csv
import io
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from testing.ranks import run_ranks
from testing.runs import write_inputs

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results" / "hosts.csv"
RANKS, STEPS = 2, 2
MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
}
STRATEGIES = {
    "DDP": ["--ds_config", "none"],
    **{f"ZeRO-{stage}": ["--ds_config", f"ds_configs/zero{stage}.json"] for stage in (1, 2, 3)},
    "FSDP2": ["--accelerate_config", "accelerate_configs/fsdp2_1x2.yaml"],
}
METHODS = {"full": [], "lora": ["--use_peft"], "qlora": ["--use_peft", "--load_in_4bit"]}
OPTIMIZERS = ("adamw_torch", "sgd", "lars")  # what a checkpoint holds of them differs
COLUMNS = (
    "strategy",
    "method",
    "optimizer",
    "ranks",
    "trained",
    "loading_bytes",
    "mapped_bytes",
    "checkpoint_bytes",
)
Row = dict[str, Any]


def cases() -> list[tuple[str, str, str]]:
    """(strategy, method, optimizer): every pair of the first two, and further optimizers where weights are trained."""
    pairs = [(strategy, method, OPTIMIZERS[0]) for strategy in STRATEGIES for method in METHODS]
    return pairs + [(strategy, "full", optimizer) for strategy in ("DDP", "FSDP2") for optimizer in OPTIMIZERS[1:]]


def write_model(folder: Path) -> list[str]:
    """The model on disk, chats, and a recipe for both; returns the flags that all cases share."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shared = write_inputs(folder)
    config = AutoConfig.from_pretrained(folder / "model")
    config.update(MODEL)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model", max_shard_size="100MB")
    recipe = json.loads((folder / "full.yaml").read_text())
    recipe["model"]["from_scratch"] = False
    recipe["training"] |= {
        "global_batch_size": 4,
        "max_steps": STEPS,
        "eval_steps": None,
        "save_steps": STEPS,
        "bf16": True,
    }
    (folder / "full.yaml").write_text(json.dumps(recipe))
    return [*shared, "--max_train_samples", "8", "--max_eval_samples", "1"]


class Sampler(threading.Thread):
    """(time, bytes owned, bytes of mapped files) of all processes below this one, until these files are there."""

    def __init__(self, marks: list[Path]) -> None:
        super().__init__(daemon=True)
        self.marks = marks
        self.samples: list[tuple[float, int, int]] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02) and not all(mark.exists() for mark in self.marks):
            own = mapped = 0
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(OSError, psutil.Error):
                    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
                    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
                    own += fields["Anonymous"] + fields["Pss_Shmem"]
                    mapped += fields["Pss_File"]
            self.samples.append((time.monotonic(), own, mapped))


def measure(case: tuple[str, str, str], shared: list[str], folder: Path) -> Row:
    """A row of hosts.csv; shared: what write_model gave for `folder`. Raises RuntimeError with the run's output when it fails."""
    strategy, method, optimizer = case
    output = folder / "outputs" / "-".join(case)
    flags = [*shared, *STRATEGIES[strategy], *METHODS[method], "--optim", optimizer, "--output_dir", str(output)]
    job = folder / "job.json"
    files = [folder / f"{output.name}-{rank}.json" for rank in range(RANKS)]
    job.write_text(json.dumps({"flags": flags, "marks": [str(file) for file in files]}))
    sampler = Sampler(files)
    sampler.start()
    done = run_ranks("benchmarks.hosts", "--job", str(job), ranks=RANKS, timeout=900)
    sampler.over.set()
    sampler.join()
    if done.returncode:
        raise RuntimeError(
            f"{case} failed with exit code {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    marks = [json.loads(file.read_text()) for file in files]
    first, last = min(mark["begin"] for mark in marks), max(mark["end"] for mark in marks)
    before = [sample for sample in sampler.samples if sample[0] < first][-1]
    while_loading = [sample for sample in sampler.samples if first <= sample[0] <= last]
    checkpoint = sum(file.stat().st_size for file in (output / f"checkpoint-{STEPS}").rglob("*") if file.is_file())
    return {
        "strategy": strategy,
        "method": method,
        "optimizer": optimizer,
        "ranks": RANKS,
        "trained": marks[0]["trained"],
        "loading_bytes": max(sample[1] for sample in while_loading) - before[1],
        "mapped_bytes": max(sample[2] for sample in while_loading) - before[2],
        "checkpoint_bytes": checkpoint,
    }


def _work(job: Path) -> None:
    """One rank: train.py itself, with the time of loading told apart."""
    import train
    from brigade.train.cluster import world_from_environment
    from brigade.train.distributed import ranks
    from brigade.train.model import load as models
    from brigade.train.model.sizes import parameter_count

    todo, load, load_base = json.loads(job.read_text()), models.load_model, models.load_base
    mark: dict[str, float] = {}

    def timed(*args: Any, **options: Any) -> Any:
        ranks.gather(0)
        time.sleep(0.3)  # for a sample of what was there before
        mark["begin"] = time.monotonic()
        model = load_base(*args, **options)
        time.sleep(0.3)  # and of all that is there now
        mark["end"] = time.monotonic()
        return model

    def counted(*args: Any, **options: Any) -> Any:
        model = load(*args, **options)
        mark["trained"] = parameter_count(model, trained=True)
        Path(todo["marks"][world_from_environment().rank]).write_text(json.dumps(mark))
        return model

    models.load_base, models.load_model = timed, counted
    with contextlib.redirect_stdout(io.StringIO()):
        train.main(todo["flags"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        sys.path.insert(0, str(REPOSITORY))
        _work(options.job)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder, RESULTS.open("w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS)
        writer.writeheader()
        shared = write_model(Path(folder))
        for case in cases():
            row = measure(case, shared, Path(folder))
            writer.writerow(row)
            out.flush()
            print(row, flush=True)


if __name__ == "__main__":
    main()
