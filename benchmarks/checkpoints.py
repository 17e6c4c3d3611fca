"""How long a checkpoint holds training up, per GiB and strategy: as Transformers saves it, and as train.py does.

    python -m benchmarks.checkpoints       # measures -> benchmarks/results/checkpoints.csv, docs/evidence/checkpoints.md

Each case is a run of train.py on two ranks with a Llama of 47 million parameters in fp32 and AdamW, and a checkpoint after every
third step; three ways take turns. `transformers`: its own _save_checkpoint, as train.py saved before; nothing is checked or
synced to the disk. `waits`: --async_save false. `async`: the default. What holds training up is the time from the end of a
step to the moment at which all ranks go on; the median of all checkpoints but a run's first, which looks for the size. `whole
after` is the time until the checkpoint has its name, synced to the disk, from events.jsonl.
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testing.on_ranks import on_ranks
from testing.runs import forget, write_inputs

from . import pages

RESULTS, PAGE = pages.RESULTS / "checkpoints.csv", pages.EVIDENCE / "checkpoints.md"
RANKS, EVERY, SAVES = 2, 3, 4
MODEL = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}
STRATEGIES = {
    "DDP": ["--ds_config", "none"],
    **{f"ZeRO-{stage}": ["--ds_config", f"ds_configs/zero{stage}.json"] for stage in (1, 2, 3)},
    "FSDP2": ["--accelerate_config", "accelerate_configs/fsdp2_1x2.yaml"],
}
WAYS = {"transformers": [], "waits": ["--async_save", "false"], "async": []}
GIB = 2**30


def measure(strategy: str, folder: Path, shared: list[str]) -> list[pages.Row]:
    """A row of each way. Raises RuntimeError with the ranks' output when a run fails."""
    job = {
        way: [*shared, *STRATEGIES[strategy], *flags, "--output_dir", str(folder / way)] for way, flags in WAYS.items()
    }
    rows = []
    for way, measured in on_ranks(_measured, job, ranks=RANKS, timeout=1800)[0].items():
        blocked, gib = statistics.median(measured["blocked"][1:]), measured["bytes"] / GIB
        row = {"strategy": strategy, "way": way, "ranks": RANKS, "gib": round(gib, 3)}
        row |= {"blocked_s": round(blocked, 3), "blocked_s_per_gib": round(blocked / gib, 3)}
        whole = statistics.median(measured["whole"][1:]) if measured["whole"] else 0.0
        rows.append(row | {"whole_s": round(whole, 3), **pages.where()})
        print(rows[-1], flush=True)
    return rows


def _measured(job: dict[str, list[str]]) -> pages.Row:
    """One rank: the runs of all ways, through train.py itself."""
    import transformers

    import train
    from brigade.train.distributed import ranks
    from brigade.train.run import events
    from brigade.train.step.trainer import Trainer

    ours, found = Trainer._save_checkpoint, pages.Row()

    def theirs(trainer: Any, model: Any, trial: Any) -> None:
        transformers.Trainer._save_checkpoint(trainer, model, trial)

    def timed(save: Callable[..., None], seconds: list[float]) -> Callable[..., None]:
        def timed_save(trainer: Any, model: Any, trial: Any) -> None:
            ranks.barrier()
            began = time.perf_counter()
            save(trainer, model, trial)
            ranks.barrier()
            seconds.append(time.perf_counter() - began)

        return timed_save

    for way, flags in job.items():
        blocked: list[float] = []
        Trainer._save_checkpoint = timed(theirs if way == "transformers" else ours, blocked)  # type: ignore[method-assign]
        output = Path(flags[-1])
        trainer = train.main(flags)
        saved = [entry["seconds"] for entry in events.read(output) if entry["event"] == "checkpoint"]
        last = output / f"checkpoint-{EVERY * SAVES}"
        size = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
        found[way] = {"blocked": blocked, "whole": saved, "bytes": size}
        forget(trainer)
        del trainer
        ranks.barrier()
        if int(os.environ["RANK"]) == 0:
            shutil.rmtree(output)
            os.sync()
        ranks.barrier()
    return found


def tables() -> dict[str, str]:
    found = {(row["strategy"], row["way"]): row for row in pages.read(RESULTS)}
    head = ["strategy", "a checkpoint", "Transformers' own", "`async_save: false`", "`async_save: true`", "whole after"]
    lines = []
    for strategy in STRATEGIES:
        rows = [found[strategy, way] for way in WAYS]
        per_gib = [f"{float(row['blocked_s_per_gib']):.2f} s/GiB" for row in rows]
        lines.append([strategy, f"{float(rows[-1]['gib']):.2f} GiB", *per_gib, f"{float(rows[-1]['whole_s']):.2f} s"])
    last = found["DDP", "async"]
    note = f"On {last['machine']}, {last['ranks']} ranks; {last['versions']}."
    return {"checkpoints": f"{pages.markdown(head, lines)}\n\n{note}"}


def main() -> None:
    pages.command_line(__doc__).parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory(dir=Path.home()) as name:  # on a disk: /tmp may be memory
            folder = Path(name)
            shared = write_inputs(folder)
            config = folder / "model" / "config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | MODEL))
            short = f"--global_batch_size 2 --max_length 32 --max_steps {EVERY * SAVES} --save_steps {EVERY} --save_total_limit 1"
            shared += [*short.split(), "--eval_steps", "null", "--max_eval_samples", "1", "--eval_answers", "0"]
            rows += measure(strategy, folder, shared)
    pages.save(RESULTS, rows)
    pages.write(PAGE, tables())


if __name__ == "__main__":
    main()
