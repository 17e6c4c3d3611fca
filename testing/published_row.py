"""A published row, from which tests' rows differ."""

from benchmarks.published import table
from benchmarks.published.job import PublishedJob
from benchmarks.published.rows import job_of_row

ROW = {"model": "llama3.1-8b", "params_b": "8.03", "layers": "32", "hidden": "4096", "ffn": "14336", "heads": "32",
       "kv_heads": "8", "vocab": "128256", "n_gpus": "8", "gpu": "A100-80GB", "inter_node": "-", "framework": "HF Trainer",
       "task": "sft-full", "strategy": "FSDP2", "mbs": "2", "grad_acc": "1", "seq_len": "2048", "precision": "bf16",
       "optimizer": "AdamW", "act_ckpt": "full", "kernels": ""}  # fmt: skip


def made(**changes: str) -> PublishedJob:
    """Return the job of the row with these changes."""
    return job_of_row(ROW | changes)


def why(**changes: str) -> str:
    """Return why the row with these changes gets no estimate."""
    found = table.predict(ROW | changes)
    assert found["pred_mem_gib"] == "" and found["reason"]
    return found["reason"]
