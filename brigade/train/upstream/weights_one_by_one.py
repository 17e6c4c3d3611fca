"""Transformers' reading of a model's files, all its conversions among it, without a place for the whole model."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handed_to(take: Callable[[str, Any], None]) -> Iterator[None]:
    """Let from_pretrained hand each weight to take(name, tensor) meanwhile, in place of the model, which stays on the meta device
    (core_model_loading.py: set_param_for_module). One is read after the other: threads would read ahead of what is taken."""
    from transformers import core_model_loading as loading

    plain, name_of_threads = loading.set_param_for_module, "HF_DEACTIVATE_ASYNC_LOAD"
    said = os.environ.get(name_of_threads)

    def hand_over(model: Any, target_name: str, value: Any, loading_info: Any, hf_quantizer: Any) -> None:
        owner, _, name = target_name.rpartition(".")
        empty = getattr(model.get_submodule(owner), name, None)
        if empty is None or empty.shape != value.shape:  # it knows what to say
            plain(model, target_name, value, loading_info, hf_quantizer)
            return
        loading_info.missing_keys.discard(target_name)
        empty._is_hf_initialized = True
        take(target_name, value)

    loading.set_param_for_module, os.environ[name_of_threads] = hand_over, "1"
    try:
        yield
    finally:
        loading.set_param_for_module = plain
        os.environ.pop(name_of_threads)
        if said is not None:
            os.environ[name_of_threads] = said
