"""What a checkpoint costs by strategy: the seconds for which it holds training up, until it is whole, and its bytes."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from testing import parity

from . import disk
from .subject import Subject, command, run

# Some 0.4 billion parameters in fp32 with two moments: 4.5 GiB
MODEL = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 10, "num_attention_heads": 12,
         "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000, "tie_word_embeddings": True}  # fmt: skip
EVERY, SAVES = 3, 2


def main() -> None:
    subject = Subject(__doc__)
    shared = subject.inputs(subject.work)
    if not subject.small:
        config = subject.work / "model" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | MODEL))
    for name in ("zero3",) if subject.small else ("zero3", "fsdp2", "ddp"):
        what, output = f"{name}, {subject.on}", subject.work / name
        words = [*shared, *parity.STRATEGIES[name], "--output_dir", str(output), "--fresh", "--bf16", "true"]
        words += f"--max_steps {EVERY * SAVES} --save_steps {EVERY} --save_total_limit 1 --eval_steps 99".split()
        words += ["--per_device_train_batch_size", "4", "--max_eval_samples", "1"]
        full = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={subject.ranks}", "train.py", *words]
        if missing := subject.no_time or disk.lacking(subject.work, 0 if subject.small else disk.CHECKPOINTS):
            subject.row(what, {}, left_out=missing, command=command(full))
            continue
        failed = run([sys.executable, *full], subject.work / f"{name}.log", subject.left - 5)
        lines = events(output, subject.work / f"{name}.jsonl")
        if failed:
            subject.row(what, {}, failed, command(full))
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
