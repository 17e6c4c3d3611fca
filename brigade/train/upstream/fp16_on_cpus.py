"""fp16 without a GPU, for tests."""

from typing import Any


def scale_losses_on_cpus(accelerator: Any) -> None:
    """fp16 on a CPU: it casts and scales nothing there, without a word (accelerator.py:568), though torch can do both."""
    import torch

    accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
