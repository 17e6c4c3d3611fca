"""Supervised tokens per second on this machine: Brigade beside TRL and a plain padded Trainer, and what each choice brings.

    python -m benchmarks.peers                  # five rounds of all five, alternating (about half an hour)
    python -m benchmarks.peers --ablation       # ours with each choice made otherwise in turn
    python -m benchmarks.peers --smollm2        # a real model by LoRA: the losses of ours and of TRL's, and how fast

The same model, weights, dialogues, tokenizer, template, precision, length limit, optimizer and threads for all; one
process; every run in a fresh one. Rows go to benchmarks/results/peers.jsonl. The peers live in .venv/peers.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

from benchmarks import pages, peers_data, peers_smollm2, peers_tables
from benchmarks.pages import REPOSITORY, Row
from benchmarks.peers_tables import tables
from testing.command_line import as_flags

RESULTS = pages.RESULTS / "peers.jsonl"
WORK = REPOSITORY / "outputs" / "peers"
PEERS = REPOSITORY / ".venv" / "peers"
REQUIREMENTS = Path(__file__).with_name("peers-requirements.txt")

# The same for all. A run is one unmeasured step and then STEPS of them, of some 4,100 tokens each.
STEPS = 8
MAX_LENGTH = 2048
SHARED: Row = {"max_length": MAX_LENGTH, "learning_rate": 1e-4, "optim": "adamw_torch_fused", "bf16": True, "seed": 1}

# A run begins when other processes use less than this share of the machine's CPU time, or after PATIENCE seconds, and
# is made again when they had more meanwhile; of ATTEMPTS runs that were all disturbed, the least disturbed counts.
QUIET, PATIENCE, ATTEMPTS = 0.04, 600, 4

# Sequences of a micro-batch, and how many micro-batches make a step: 2 packs, or 12 dialogues (343 tokens on average).
# Each peer has the micro-batch that is fastest for it on a CPU.
PEER_RUNS: dict[str, Row] = {
    "trl_packed": {"module": "benchmarks.peers_trl", "packing": True, "micro_batch": 1, "accumulation": 2},
    "trl_padding_free": {"module": "benchmarks.peers_trl", "packing": False, "micro_batch": 1, "accumulation": 12},
    "padded": {"module": "benchmarks.peers_padded", "micro_batch": 4, "accumulation": 3},
}  # fmt: skip
OF_PEERS = PEER_RUNS | {name: {"module": "benchmarks.peers_trl"} | run for name, run in peers_smollm2.TRL.items()}
PEER_ATTENTION = "sdpa"  # the only one of Transformers' own that isolates packed samples on a CPU and is fast

# Ours: flags of train.py over the shared recipe.
OURS: dict[str, str] = {
    "packing": "true", "padding_free": "true", "attn_implementation": "auto", "torch_compile": "true",
    "global_batch_size": "2", "per_device_train_batch_size": "2",
}  # fmt: skip
PLAIN = "not compiled"
# Each choice made otherwise, as flags over OURS; "without": what no flag switches off (benchmarks/peers_without.py).
ABLATION: dict[str, dict[str, str]] = {
    PLAIN: {"torch_compile": "false"},
    "attention by torch's own kernel": {"without": "blocks"},
    "attention through a mask": {"attn_implementation": "sdpa"},
    "logits at every position": {"without": "kept_logits"},
    "no packing": {"packing": "false", "global_batch_size": "12"},
    "no packing, padded": {
        "packing": "false", "padding_free": "false", "global_batch_size": "12", "per_device_train_batch_size": "4",
    },
    "fp32": {"bf16": "false"},
    "unfused AdamW": {"optim": "adamw_torch"},
    "8-bit AdamW": {"optim": "adamw_8bit"},
    "activation checkpointing": {"activation_checkpointing": "true"},
}  # fmt: skip
CHANGED = ABLATION | peers_smollm2.OURS
# What each kind of measurement runs in a round.
KINDS: dict[str, list[str]] = {
    "peers": [peers_tables.OURS, PLAIN, *PEER_RUNS],
    "ablation": [peers_tables.OURS, *ABLATION],
    "smollm2": [name for pair in zip(peers_smollm2.OURS, peers_smollm2.TRL, strict=True) for name in pair],
}


# ---- one run -----------------------------------------------------------------------------------------------------
def environment() -> dict[str, str]:
    """Every run has all cores' threads, and asks no server for anything."""
    threads = str(len(os.sched_getaffinity(0)))
    return os.environ | {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}


def busy_seconds() -> float:
    """CPU seconds that all processes of this host have used since it started; 0 where /proc does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet() -> None:
    """Return when the machine has been idle for three seconds, at the latest after PATIENCE seconds."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        busy = busy_seconds()
        time.sleep(3)
        if (busy_seconds() - busy) / 3 / (os.cpu_count() or 1) <= QUIET:
            return


def _run(command: list[str], log: Path) -> float:
    """Run to the end; returns the share of the machine's CPU time that other processes had meanwhile.

    Raises RuntimeError with the end of the log when the command fails.
    """
    began, busy, own = time.monotonic(), busy_seconds(), sum(os.times()[2:4])
    with log.open("w") as out:
        done = subprocess.run(command, cwd=REPOSITORY, env=environment(), stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{log.read_text()[-3000:]}")
    others = busy_seconds() - busy - (sum(os.times()[2:4]) - own)
    share = others / (time.monotonic() - began) / (os.cpu_count() or 1)
    return round(min(1.0, max(0.0, share)), 3)  # both clocks tick: short runs come out below 0 or above 1


def run_peer(name: str, data: Row, steps: int) -> Row:
    """One run of a peer, in the peers' environment; what it counted."""
    own = {key: value for key, value in OF_PEERS[name].items() if key != "module"}
    settings = SHARED | data.get("settings", {}) | own
    result = WORK / f"{name}.result.json"
    result.unlink(missing_ok=True)
    places = {key: data[key] for key in ("train", "model", "tokenizer", "chat_template") if key in data}
    job = (
        settings
        | places
        | {"attention": PEER_ATTENTION, "steps": steps, "output": str(WORK / name), "result": str(result)}
    )
    (WORK / f"{name}.json").write_text(json.dumps(job, indent=1))
    command = [str(PEERS / "bin" / "python"), "-m", OF_PEERS[name]["module"], str(WORK / f"{name}.json")]
    others = _run(command, WORK / f"{name}.log")
    return json.loads(result.read_text()) | {"others": others, "settings": settings | {"attention": PEER_ATTENTION}}


def recipe(data: Row, steps: int) -> Row:
    """What all of our runs share, as a recipe."""
    return {
        "model": {"model_name_or_path": data["model"], "tokenizer_name_or_path": data["tokenizer"]},
        "data": {
            "train_file": data["train"],
            "validation_file": data["heldout"],
            "chat_template": "chatml",
            "max_length": MAX_LENGTH,
        },
        "training": {
            "global_batch_size": 2,
            "max_steps": steps + 1,
            "learning_rate": SHARED["learning_rate"],
            "adam_beta2": 0.999,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 1.0,
            "optim": SHARED["optim"],
            "bf16": SHARED["bf16"],
            "seed": SHARED["seed"],
            "logging_steps": 1,
            "eval_answers": 0,
            "save_steps": None,
            "report_to": [],
        },
    }


def run_ours(flags: dict[str, str], data: Row, steps: int) -> Row:
    """One run of train.py; what its log says of all steps but the first."""
    output = WORK / "ours"
    shutil.rmtree(output, ignore_errors=True)  # a finished run would not run again
    if "recipe" not in data:
        (WORK / "ours.yaml").write_text(json.dumps(recipe(data, steps), indent=1))  # JSON is YAML
    changed = {"max_steps": steps + 1} | {key: value for key, value in flags.items() if key != "without"}
    program = ["-m", "benchmarks.peers_without", flags["without"], "--"] if "without" in flags else ["train.py"]
    words = as_flags(recipe=data.get("recipe", str(WORK / "ours.yaml")), output_dir=str(output), **changed)
    command = [sys.executable, *program, *words]
    others = _run(command, WORK / "ours.log")
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    shutil.rmtree(output)
    return from_log(history, steps) | {"others": others, "settings": SHARED | data.get("settings", {}) | flags}


def from_log(history: list[Row], steps: int) -> Row:
    """Rates over all steps but the first, from a log with one entry per step.

    Raises RuntimeError when the log has another number of steps, or no supervised_tokens_per_second.
    """
    entries = [entry for entry in history if "loss" in entry]
    if len(entries) != steps + 1 or any("supervised_tokens_per_second" not in entry for entry in entries):
        raise RuntimeError(
            f"the log has {len(entries)} steps instead of {steps + 1}, or no supervised tokens: {entries[:1]}"
        )
    timed = entries[1:]
    seconds = sum(entry["step_time"] for entry in timed)
    counts = {
        key: sum(entry[f"{key}_per_second"] * entry["step_time"] for entry in timed)
        for key in ("tokens", "supervised_tokens")
    }
    return {
        "steps": len(timed),
        "seconds": round(seconds, 3),
        **{key: round(count) for key, count in counts.items()},
        **{f"{key}_per_second": round(count / seconds, 2) for key, count in counts.items()},
        "peak_memory_gib": round(max(entry["peak_memory_gib"] for entry in entries), 3),
        "first_loss": entries[0]["loss"],
        "last_loss": entries[-1]["loss"],
        "losses": [entry["loss"] for entry in entries],
    }


# ---- rounds ------------------------------------------------------------------------------------------------------
def measure(kind: str, only: list[str], pairs: int, steps: int) -> None:
    """`pairs` rounds of ours and all others of a kind (or of `only`), one after the other in each; appends a row per run
    to RESULTS."""
    from brigade.train.run.versions import of_packages

    WORK.mkdir(parents=True, exist_ok=True)
    data = (peers_smollm2.build if kind == "smollm2" else peers_data.build)(WORK / "data")
    names = only or KINDS[kind]
    if OF_PEERS.keys() & set(names):
        prepare_peers()
    where = {
        "measurement": datetime.now().astimezone().isoformat(timespec="seconds"),
        "kind": kind,
        "only": bool(only),
        "device": pages.machine(),
        "threads": int(environment()["OMP_NUM_THREADS"]),
        "command": command(kind, pairs, steps),
        "data": {key: data[key] for key in ("sha256", "dialogues")},
        "model": data.get("shape", peers_data.MODEL) | {"parameters": data["parameters"]},
    }
    ours = of_packages()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for number in range(pairs):
        for name in names:
            row = undisturbed(name, data, steps)
            whole = where | {"name": name, "round": number + 1, "versions": ours} | row
            with RESULTS.open("a") as file:
                file.write(json.dumps(whole) + "\n")
            print(
                f"{time.strftime('%H:%M:%S')} round {number + 1} {name}: {row['supervised_tokens_per_second']:.1f} "
                f"supervised tokens/s ({row['seconds']:.0f} s, others {row['others']:.0%})",
                flush=True,
            )


def undisturbed(name: str, data: Row, steps: int) -> Row:
    """One run that had the machine to itself, or of several the one that had it most."""
    rows: list[Row] = []
    while not rows or (rows[-1]["others"] > QUIET and len(rows) < ATTEMPTS):
        wait_until_quiet()
        rows.append(
            run_peer(name, data, steps)
            if name in OF_PEERS
            else run_ours(data.get("flags", OURS) | CHANGED.get(name, {}), data, steps)
        )
        print(f"{name}: others had {rows[-1]['others']:.0%} of the machine", flush=True)
    return min(rows, key=lambda row: row["others"])


def command(kind: str, pairs: int, steps: int) -> str:
    """What prints these rows."""
    words = ["python -m benchmarks.peers", *([f"--{kind}"] if kind != "peers" else []), f"--pairs {pairs}"]
    return " ".join([*words, *([f"--steps {steps}"] if steps != STEPS else [])])


def prepare_peers() -> None:
    """Set up .venv/peers from the requirements beside this file, unless that was done since they changed."""
    complete = PEERS / ".complete"
    if complete.exists() and complete.stat().st_mtime >= REQUIREMENTS.stat().st_mtime:
        return
    print(f"setting up {PEERS.relative_to(REPOSITORY)} ...", flush=True)
    if not (PEERS / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
    pip = [str(PEERS / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", str(REQUIREMENTS)], check=True)
    complete.touch()


def main() -> int:
    parser = pages.command_line(__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="rounds; a figure is their median (default: 5)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"measured steps of a run (default: {STEPS})")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--ablation", action="store_true", help="ours, with each choice made otherwise in turn")
    kinds.add_argument(
        "--smollm2", action="store_true", help="a real model by LoRA, ours and TRL's, with each step's loss"
    )
    every = dict.fromkeys(name for names in KINDS.values() for name in names)
    parser.add_argument("--only", nargs="+", choices=every, help="only these runs of that kind; writes no page")
    options = parser.parse_args()
    kind = "ablation" if options.ablation else "smollm2" if options.smollm2 else "peers"
    if unknown := set(options.only or []) - {*KINDS[kind]}:
        parser.error(f"--only {' '.join(sorted(unknown))}: no run of {command(kind, options.pairs, options.steps)}")
    measure(kind, options.only or [], options.pairs, options.steps)
    if not options.only:
        pages.write(peers_tables.PAGE, tables())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
