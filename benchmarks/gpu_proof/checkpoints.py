"""What a checkpoint costs by strategy: the seconds for which it holds training up, until it is whole, and its bytes."""

import json
import shutil
from pathlib import Path
from typing import Any

from . import disk
from .subject import Subject, command, torchrun

# Some 0.4 billion parameters in fp32 with two moments: 4.5 GiB
MODEL = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 10, "num_attention_heads": 12,
         "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000, "tie_word_embeddings": True}  # fmt: skip
EVERY, SAVES = 3, 2
LENGTH = 64  # of a sample at most, as runs.write_inputs() has it
OPERATIONS = EVERY * SAVES * LENGTH * 6 * 0.4e9  # of each rank


def main() -> None:
    subject = Subject(__doc__)
    shared = subject.inputs(subject.work)
    if not subject.small:
        config = subject.work / "model" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | MODEL))
    for name in subject.strategies:
        what, output = f"{name}, {subject.on}", subject.work / name
        words = [*shared, *subject.flags(name, output), "--save_steps", str(EVERY), "--save_total_limit", "1"]
        # A sample on each rank: what a step computes is not measured.
        words += ["--max_steps", str(EVERY * SAVES), "--per_device_train_batch_size", "1"]
        full = torchrun(subject.ranks, "train.py", *words, "--global_batch_size", str(subject.ranks))
        missing = subject.no_time
        if not subject.small:
            missing = missing or subject.too_slow(OPERATIONS) or disk.lacking(subject.work, disk.CHECKPOINTS)
        if missing:
            subject.row(what, {}, left_out=missing, command=command(full))
            continue
        failed, late = subject.run(full, name)
        lines = events(output, subject.work / f"{name}.jsonl")
        if failed or late:
            subject.row(what, {}, failed, command(full), left_out=late)
            continue
        saved = [line for line in lines if line["event"] == "checkpoint"]
        shortfall = "" if len(saved) == SAVES else f"{len(saved)} checkpoints of {SAVES}"
        subject.row(what, figures_of(saved), shortfall, command(full))


def events(output: Path, kept: Path) -> list[dict[str, Any]]:
    """Return what a run told of itself, keep it in a file, and remove the run: its model and checkpoints take 10 GB."""
    told = output / "events.jsonl"
    if told.exists():
        told.replace(kept)
    shutil.rmtree(output, ignore_errors=True)
    return [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []


def figures_of(saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first checkpoint's seconds and the last one's: the first looks for sizes and makes buffers."""
    if not saved:
        return {}
    first, last = saved[0], saved[-1]
    gib = last["bytes"] / 2**30
    return {
        "gib": round(gib, 3),
        "first_blocked_s": first["blocked"],
        "blocked_s": last["blocked"],
        "whole_after_s": last["seconds"],
        "blocked_s_per_gib": round(last["blocked"] / gib, 3) if gib else None,
    }


if __name__ == "__main__":
    main()
