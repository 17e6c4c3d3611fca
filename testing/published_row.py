"""A published row, from which tests' rows differ."""

ROW = {"model": "llama3.1-8b", "params_b": "8.03", "layers": "32", "hidden": "4096", "ffn": "14336", "heads": "32",
       "kv_heads": "8", "vocab": "128256", "n_gpus": "8", "gpu": "A100-80GB", "inter_node": "-", "framework": "HF Trainer",
       "task": "sft-full", "strategy": "FSDP2", "mbs": "2", "grad_acc": "1", "seq_len": "2048", "precision": "bf16",
       "optimizer": "AdamW", "act_ckpt": "full", "kernels": ""}  # fmt: skip
