"""How long Python takes to launch a layer under ZeRO-3 and FSDP2, by the number of ranks.

    python -m benchmarks.launching           # measures -> benchmarks/results/launching.csv, docs/evidence/planner-accuracy.md

One process is rank 0 of as many ranks as it is told there are. Its collectives return at once, with zeros, and its matrices are
so small that they cost next to nothing: what is left is what Transformers, DeepSpeed and torch do for each layer before a GPU
could begin, and for each rank. FSDP2 is measured with few ranks: what a GPU copies for all ranks in one kernel, a CPU copies
one by one. DeepSpeed is the pinned one, unchanged. Each figure is (12 layers - 4 layers) / 8 of medians of fifteen steps in
fresh processes, the median of five turns. A GPU's kernels take longer to launch than a CPU's; only ratios are used.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from brigade.train.upstream import deepspeed_kernels

from .pages import EVIDENCE, REPOSITORY, RESULTS, command_line, markdown, read, save, where, write

PATH, PAGE = RESULTS / "launching.csv", EVIDENCE / "planner-accuracy.md"
HIDDEN, LAYERS, TOKENS, STEPS, ROUNDS = 256, (4, 12), 16, 18, 5
# (kind, ranks, checkpointing)
CASES = [("plain", 1, False), ("plain", 1, True), ("fsdp2", 8, True)]
CASES += [("zero3", ranks, False) for ranks in (8, 1024)] + [("zero3", ranks, True) for ranks in (8, 64, 256, 1024)]


def pretend(ranks: int) -> None:
    """A process group of so many ranks, of which only this one is there."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Done:
        def wait(self, *_: Any) -> bool:
            return True

    def nothing(*tensors: Any, **named: Any) -> Done:
        out: Any = tensors[0] if tensors else named.get("output_tensor", named.get("output"))
        out.zero_()  # what lies there by chance may be slow to compute with
        return Done()

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "DS_ACCELERATOR": "cpu"}
    deepspeed_kernels.find()
    deepspeed_kernels.end_locks_with_their_holder()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(dist, name, nothing)


def step_of(kind: str, ranks: int, layers: int, checkpointing: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """(a forward and a backward pass of a Llama of so many layers, what comes after it)"""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    if kind != "plain":
        pretend(ranks)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 688, "num_hidden_layers": layers, "vocab_size": 1024}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.float32 if kind == "fsdp2" else torch.bfloat16)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    tokens = torch.zeros((1, TOKENS), dtype=torch.long)
    run, backward = model, torch.Tensor.backward
    if kind == "zero3":
        import deepspeed

        deepspeed_kernels.without_shared_memory()
        # What Transformers puts where ds_configs/zero3.json says "auto"; and of the model no more lies there than a layer or two.
        zero = {"stage": 3, "reduce_bucket_size": HIDDEN**2, "stage3_prefetch_bucket_size": int(0.9 * HIDDEN**2)}
        zero |= {"stage3_param_persistence_threshold": 10 * HIDDEN}
        zero |= {"stage3_max_live_parameters": 1_500_000, "stage3_max_reuse_distance": 0}
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
        config |= {"optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}}}
        run, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
        backward = run.backward
    elif kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh, policy = init_device_mesh("cpu", (ranks,)), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)

    def once() -> None:
        backward(run(input_ids=tokens, labels=tokens).loss)

    def ended() -> None:
        run.step() if kind == "zero3" else model.zero_grad()

    return once, ended


def measure(kind: str, ranks: int, layers: int, checkpointing: bool) -> float:
    """Seconds of a forward and a backward pass, the median."""
    (once, ended), took = step_of(kind, ranks, layers, checkpointing), []
    for _ in range(STEPS):
        began = time.perf_counter()
        once()
        took.append(time.perf_counter() - began)
        ended()
    return statistics.median(took[3:])


def tables() -> dict[str, str]:
    rows = read(PATH)
    plain = {row["checkpointing"]: float(row["layer_ms"]) for row in rows if row["kind"] == "plain"}
    names = {"plain": "Transformers alone", "fsdp2": "FSDP2", "zero3": "DeepSpeed ZeRO-3"}
    lines = [
        [
            names[row["kind"]],
            row["ranks"],
            row["checkpointing"],
            f"{float(row['layer_ms']):.2f}",
            f"{float(row['layer_ms']) / plain[row['checkpointing']]:.1f}",
        ]
        for row in rows
    ]
    return {"launching": markdown(["", "ranks", "checkpointing", "ms of a layer", "times Transformers alone"], lines)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(measure(*json.loads(options.one)))
        return
    took: dict[tuple[str, int, bool], list[float]] = {case: [] for case in CASES}
    for _ in range(ROUNDS):
        for kind, ranks, checkpointing in CASES:
            both = []
            for layers in LAYERS:
                told = json.dumps([kind, ranks, layers, checkpointing])
                command = [sys.executable, "-m", "benchmarks.launching", "--one", told]
                done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
                both.append(float(done.stdout.split()[-1]))
            took[kind, ranks, checkpointing].append((both[1] - both[0]) / (LAYERS[1] - LAYERS[0]))
    rows = [
        {"kind": kind, "ranks": ranks, "checkpointing": "on" if again else "off"}
        | {"layer_ms": round(1000 * statistics.median(of), 3)}
        | where()
        for (kind, ranks, again), of in took.items()
    ]
    save(PATH, rows)
    write(PAGE, tables())


if __name__ == "__main__":
    main()
