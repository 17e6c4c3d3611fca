"""What a rank holds while its model loads: memory of its host, and of its GPU.

    python -m benchmarks.loading after      # measures -> benchmarks/results/loading.csv, in place of the rows `after`

Each case is two ranks of train.py on fake GPUs (testing/fake_gpu) with a random model that lies on disk in bf16, in files of
100 MB: a Llama of 174 million parameters, or a mixture of 163 million, of which 151 million are in experts. From before the model
is read until the trainer begins its first step, a thread of each rank asks every 10 ms what the process owns (Anonymous in
/proc/self/smaps_rollup), less what it owned before and less what the fake GPU has handed out, which is the host's memory here.
Pages of the model's files are not counted, for the system may drop them. On the GPU are the model, what it was made of, and the
engine's own states where it makes them before the first step.
"""

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from testing.on_ranks import on_ranks, tell

from . import hosts, pages
from .pages import Row, markdown, read

RESULTS = pages.RESULTS / "loading.csv"
MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "moe_intermediate_size": 384,
    "intermediate_size": 1024,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "architectures": ["Qwen3MoeForCausalLM"],
}
MODELS: dict[str, dict[str, Any]] = {"dense": hosts.MODEL, "mixture": MIXTURE}
STRATEGIES = ("DDP", "ZeRO-2", "ZeRO-3", "FSDP2")
# What every rank would convert: to fp32 all weights that are trained, to one tensor a layer's experts, whatever trains them.
CASES = [
    (model, method, strategy) for model, method in (("dense", "full"), ("mixture", "lora")) for strategy in STRATEGIES
]


class Sampler(threading.Thread):
    """The most that this process owned beside its fake GPU, bytes, until it is told that it is over."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over, self.most, self.before = threading.Event(), 0, self.owned()

    @staticmethod
    def owned() -> int:
        import torch

        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        anonymous = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))
        return anonymous - int(torch.cuda.memory_allocated())

    def run(self) -> None:
        while not self.over.wait(0.01):
            self.most = max(self.most, self.owned() - self.before)


def measure(model: str, strategy: str, method: str, shared: list[str], folder: Path) -> Row:
    """Return a row of loading.csv, without `when`. Raises RuntimeError with the run's output when it fails."""
    name = f"{model}-{strategy}-{method}"
    flags = [*shared, *hosts.STRATEGIES[strategy], *hosts.METHODS[method], "--output_dir", str(folder / name)]
    flags += ["--attn_implementation", "sdpa"]  # proofs of others take time
    ranks = on_ranks(_held, flags, ranks=hosts.RANKS, gpus=True)
    return {
        "model": model,
        "strategy": strategy,
        "method": method,
        "parameters": parameters_of(folder / "model"),
        "first_rank": ranks[0]["host"],
        "other_rank": ranks[1]["host"],
        "gpu": max(rank["gpu"] for rank in ranks),
    }


def _held(flags: list[str]) -> None:
    """One rank: train.py until its first step; tells what its host and its GPU held at most."""
    import torch
    from transformers import TrainerCallback

    import train
    from brigade.train.distributed import ranks
    from brigade.train.model import load as models

    load_model = models.load_model
    seen: dict[str, Any] = {}

    def begun(*args: Any, **options: Any) -> Any:
        ranks.gather(0)
        time.sleep(0.2)
        seen["sampler"] = sampler = Sampler()
        sampler.start()
        return load_model(*args, **options)

    class Ended(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            sampler = seen["sampler"]
            time.sleep(0.05)
            sampler.over.set()
            tell({"host": sampler.most, "gpu": torch.cuda.max_memory_allocated()})
            ranks.gather(0)
            os._exit(0)

    models.load_model = begun
    train.main(flags, (Ended(),))


def parameters_of(folder: Path) -> int:
    """Count the parameters in the files of a model in bf16, by their sizes."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 2


def table() -> str:
    """Bytes per parameter, before and after."""
    rows = {(row["when"], row["model"], row["strategy"], row["method"]): row for row in read(RESULTS)}
    lines = []
    for case in [key[1:] for key in rows if key[0] == "after" and ("before", *key[1:]) in rows]:
        both = [rows[when, *case] for when in ("before", "after")]
        parts = ("first_rank", "other_rank", "gpu")
        lines.append([*case, *(f"{int(row[part]) / int(row['parameters']):.1f}" for part in parts for row in both)])
    head = ["first rank's host, before", "after", "another rank's, before", "after", "GPU, before", "after"]
    return markdown(["model", "strategy", "method", *head], lines)


def main() -> None:
    parser = pages.command_line(__doc__)
    parser.add_argument("when", nargs="?", default="after", choices=["before", "after"])
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[Row] = [row for row in read(RESULTS) if row["when"] != options.when] if RESULTS.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        shared = {model: hosts.write_model(Path(folder, model), sizes) for model, sizes in MODELS.items()}
        for model, method, strategy in CASES:
            row = measure(model, strategy, method, shared[model], Path(folder, model))
            rows.append({"when": options.when} | row)
            print(rows[-1], flush=True)
    pages.save(RESULTS, rows)
    print(table())


if __name__ == "__main__":
    main()
