"""The disk that a checkpoint takes, beside the formula.

    python -m benchmarks.hosts           # measures -> benchmarks/results/hosts.csv; then: python -m benchmarks.planner

Each case is two steps of train.py on two ranks with a Llama of 174 million parameters that lies on disk in bf16, in files of
100 MB. benchmarks/loading.py measures what the ranks hold meanwhile.
"""

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from testing.on_ranks import on_ranks
from testing.runs import write_inputs

from . import pages
from .pages import Row

RESULTS = pages.RESULTS / "hosts.csv"
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


def cases() -> list[tuple[str, str, str]]:
    """(strategy, method, optimizer): every pair of the first two, and further optimizers where weights are trained."""
    pairs = [(strategy, method, OPTIMIZERS[0]) for strategy in STRATEGIES for method in METHODS]
    return pairs + [(strategy, "full", optimizer) for strategy in ("DDP", "FSDP2") for optimizer in OPTIMIZERS[1:]]


def write_model(folder: Path, sizes: dict[str, Any] | None = None) -> list[str]:
    """The model on disk, chats, and a recipe for both; returns the flags that all cases share. sizes: in place of MODEL's"""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    shared = write_inputs(folder)
    known = json.loads((folder / "model" / "config.json").read_text()) | (sizes or MODEL)
    config = CONFIG_MAPPING[known["model_type"]].from_dict(known)
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


def measure(case: tuple[str, str, str], shared: list[str], folder: Path) -> Row:
    """A row of hosts.csv; shared: what write_model gave for `folder`. Raises RuntimeError with the run's output when it fails."""
    strategy, method, optimizer = case
    output = folder / "outputs" / "-".join(case)
    flags = [*shared, *STRATEGIES[strategy], *METHODS[method], "--optim", optimizer, "--output_dir", str(output)]
    trained = on_ranks(_trained, flags, ranks=RANKS)[0]
    checkpoint = sum(file.stat().st_size for file in (output / f"checkpoint-{STEPS}").rglob("*") if file.is_file())
    return {
        "strategy": strategy,
        "method": method,
        "optimizer": optimizer,
        "ranks": RANKS,
        "trained": trained,
        "checkpoint_bytes": checkpoint,
    }


def _trained(flags: list[str]) -> int:
    """One rank: train.py itself. Return how many parameters it trains."""
    import train

    with contextlib.redirect_stdout(io.StringIO()):
        trainer = train.main(flags)
    return trainer.engine.parameter_count(trainer.model, trained=True)


def main() -> None:
    pages.command_line(__doc__).parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        shared = write_model(Path(folder))
        for case in cases():
            rows.append(measure(case, shared, Path(folder)))
            print(rows[-1], flush=True)
            pages.save(RESULTS, rows)


if __name__ == "__main__":
    main()
