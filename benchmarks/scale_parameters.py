"""What grows with a model's parameters: the seconds until the first step, and those that the first two checkpoints block.

benchmarks.scale calls measure(). Each run is one of train.py on two ranks: two steps, a checkpoint after each. The second step
waits until the first checkpoint is whole, so that the second one finds no other that is still on its way to the disk. Strategies
take turns, and each figure is the median of REPEATS runs.
"""

import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testing.on_ranks import on_ranks
from testing.runs import write_inputs

from . import pages
from .checkpoints import GIB, STRATEGIES

RANKS, REPEATS = 2, 3
TAKEN = ("gib", "start_s", "start_cpu_s", "save_1_s", "save_2_s", "save_1_cpu_s", "save_2_cpu_s")
SHARDED = ("ZeRO-3", "FSDP2")
WIDTHS = (256, 512, 1024, 2048)  # of six layers: 5, 19, 71 and 274 million parameters
SHORT = "--global_batch_size 2 --max_length 32 --max_steps 2 --save_steps 1 --save_total_limit 1 --eval_steps null"
SHORT += " --max_eval_samples 1 --eval_answers 0 --optim adamw_torch"


def model(width: int) -> pages.Row:
    """Return what a Llama's config.json has of one width: in each layer 10.75 * width**2 parameters."""
    heads = width // 64
    shape = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": 6, "head_dim": 64}
    return shape | {"num_attention_heads": heads, "num_key_value_heads": heads // 4}


def parameters(config: pages.Row) -> int:
    """Return how many parameters a Llama with tied embeddings has."""
    width, inner, groups = config["hidden_size"], config["intermediate_size"], config["num_key_value_heads"]
    layer = 2 * width * (width + groups * config["head_dim"]) + 3 * width * inner + 2 * width
    return int(config["vocab_size"] * width + config["num_hidden_layers"] * layer + width)


def measure(folder: Path) -> Iterator[pages.Row]:
    """Yield a row of each width and strategy. Raises RuntimeError with the ranks' output where a run fails."""
    os.environ["OMP_NUM_THREADS"] = "1"
    shared = [*write_inputs(folder), *SHORT.split()]
    file = folder / "model" / "config.json"
    begun = json.loads(file.read_text())
    runs_of(shared, folder, "ZeRO-3")  # the process that forks ranks is there then, and caches are filled
    for width in WIDTHS:
        config = begun | model(width)
        file.write_text(json.dumps(config))
        found: dict[str, list[pages.Row]] = {strategy: [] for strategy in SHARDED}
        for _ in range(REPEATS):
            for strategy in SHARDED:
                found[strategy].append(runs_of(shared, folder, strategy))
        for strategy, rows in found.items():
            middle = {key: statistics.median(row[key] for row in rows) for key in TAKEN}
            of_all = {"millions": round(parameters(config) / 1e6), "strategy": strategy, "through": rows[0]["through"]}
            per_gib = {f"{key}_per_gib": round(middle[key] / middle["gib"], 2) for key in TAKEN if "save" in key}
            yield of_all | {key: round(value, 2) for key, value in middle.items()} | per_gib


def runs_of(shared: list[str], folder: Path, strategy: str) -> pages.Row:
    """Return what one run took: until the end of its first step, and for its two checkpoints, seconds by the clock and those of
    all ranks' processors."""
    from brigade.train.run import events

    output = folder / "run"
    flags = [*shared, *STRATEGIES[strategy], "--output_dir", str(output)]
    began = time.time()
    ranks = on_ranks(_took, flags, ranks=RANKS)
    first, second = events.read(output, "checkpoint")[-2:]
    shutil.rmtree(output)
    os.sync()  # what is left of it in the system's cache would have to go when the next run wants memory
    row = {
        "gib": first["bytes"] / GIB,
        "through": first["through"],
        "start_s": max(rank["stepped"] for rank in ranks) - began,
    }
    row |= {"save_1_s": first["blocked"], "save_2_s": second["blocked"]}
    return row | {f"{key}_cpu_s": sum(rank[key] for rank in ranks) for key in ("start", "save_1", "save_2")}


def _took(flags: list[str]) -> dict[str, float]:
    """One rank."""
    from transformers import TrainerCallback

    import train
    from brigade.train.step.checkpoints import Checkpoints

    took: dict[str, float] = {}
    save = Checkpoints.save

    def timed(self: Checkpoints) -> None:
        began = time.process_time()
        save(self)
        took[f"save_{self.trainer.state.global_step}"] = time.process_time() - began

    class Watches(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                took.update(start=time.process_time(), stepped=time.time())

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            while state.global_step == 1 and not Path(args.output_dir, "checkpoint-1").exists():
                time.sleep(0.05)

    Checkpoints.save = timed  # type: ignore[method-assign]
    train.main(flags, callbacks=(Watches(),))
    return took
