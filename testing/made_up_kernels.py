"""Made-up GPUs and proofs of kernels, for tests: no GPU has made one."""

import transformers

from brigade.kernels import judging, models, paths, proofs
from brigade.train.host.cluster import World

SHAPES = {"dtype": "bf16", "max_length": 256, "micro_batch": 1, "packing": True}
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "intermediate_size": 1024}
# Where half precision is the question, and not a kernel's tiles: a CPU without instructions for it takes many times as long.
NARROW = {
    "gpt2": {"n_head": 4, "n_embd": 128},
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32},
    "mistral": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32},
}
CPU = {"type": "cpu", "name": "a CPU", "capability": None, "driver": "6.1", "cuda": None}


def gpu(name, capability, driver="570.86.10"):
    return {"type": "cuda", "name": name, "capability": capability, "driver": driver, "cuda": "12.8"}


A100, H100, RTX_4090 = (
    gpu("NVIDIA A100-SXM4-80GB", 8.0),
    gpu("NVIDIA H100 80GB HBM3", 9.0),
    gpu("NVIDIA GeForce RTX 4090", 8.9),
)


def config(family="llama", **values):
    return models.as_json(transformers.AutoConfig.for_model(family, **(LLAMA if family == "llama" else {}) | values))


def own(*names):
    return {name: paths.table()[name] for name in names}


def proof_of(device, shapes=SHAPES, written=None, **milliseconds):
    """A made-up proof: no GPU has made one."""
    rows = {name: row for name, row in paths.table().items() if row["kind"] == "attention"}
    found = {}
    for name in rows:
        status = "proven" if name in milliseconds else "absent"
        found[name] = {"kind": "attention", "status": status, "why": "", "ms": milliseconds.get(name)}
    fastest = judging.judge(rows, found)
    key = proofs.key(written or config(), shapes, device)
    return {"key": key, "quick": True, "seconds": 9.0, "made": 0, "fastest": fastest, "paths": found}


WORLD = World(0, 0, 1, 1, "host-1", "python")
RUN = ("--bf16", "--max_length", "256", "--packing")
