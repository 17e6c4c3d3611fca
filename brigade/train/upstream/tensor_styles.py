"""Transformers' styles of tensor parallelism, and layers that compute with no DTensors."""

from typing import Any


def compute_locally(linear: Any) -> None:
    """Let a style hand a layer this rank's values, and take them from it, as it does for quantised weights of its own
    (transformers 5.23, distributed/tensor_parallel.py: should_use_local_tensors)."""
    linear._hf_quantized_needs_local_tp = True


def give_plan(model: Any, plan: dict[str, str]) -> None:
    """Say what AutoTP divides, beside the plan of the model's config (deepspeed 0.19.8, runtime/tensor_parallel/config.py:
    _get_hf_tp_plan)."""
    model._tp_plan = plan
