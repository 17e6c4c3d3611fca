"""The catalogue of accelerators (hardware.yaml) and model FLOPs utilisation."""

import functools
import re
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Device name (a regular expression for the whole of it) -> {"bf16_tflops", "source"}."""
    return yaml.safe_load(Path(__file__).with_name("hardware.yaml").read_text())


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of a device by the name its driver gives, or None for an unknown one."""
    return next((entry["bf16_tflops"] for key, entry in catalogue().items() if re.fullmatch(key, device_name)), None)


def flops_per_token(parameters: int, layers: int, hidden_size: int, attended_length: float) -> float:
    """Model FLOPs of forward and backward for one token of full fine-tuning: 6 N + 12 L h s.

    Torchtitan's and PaLM's convention (arXiv 2204.02311, appendix B): N all parameters, embeddings included; attention
    without the causal discount; recomputation not counted. attended_length: mean over tokens of their sample's length,
    the sum of squared lengths over the sum of lengths.
    """
    return 6 * parameters + 12 * layers * hidden_size * attended_length


def mfu(tokens_per_second_per_device: float, flops_per_token: float, device_name: str) -> float | None:
    """Model FLOPs utilisation in percent of the device's dense bf16 peak, or None where the peak is not known."""
    peak = peak_tflops(device_name)
    return None if peak is None else 100 * tokens_per_second_per_device * flops_per_token / (peak * 1e12)
