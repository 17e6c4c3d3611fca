"""Model states in bytes, from the tensors that this rank really holds: parameters, gradients, optimizer states."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback


@dataclass(frozen=True)
class States:
    """Bytes on one rank. optimizer: moments and, where the engine keeps one, the fp32 master copy of the parameters."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


class StateBytes(TrainerCallback):
    """Measures at an optimizer step, when gradients are reduced and not yet freed; `states` holds the newest figures."""

    def __init__(self) -> None:
        self.states: States | None = None
        self._gradients: dict[int, int] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any):
        self.model, self.engine = model, getattr(optimizer, "optimizer", optimizer)
        self.inner = getattr(self.engine, "optimizer", self.engine)  # DeepSpeed wraps the optimizer once more
        self.hook = self.inner.register_step_pre_hook(lambda *_: self._see_gradients())

    def _see_gradients(self) -> None:
        # ZeRO-3 steps once per sub-group of parameters, and only that group's gradients are there: add up over them.
        self._gradients |= storages(self._gradient_tensors())

    def _gradient_tensors(self) -> Iterator[Any]:
        yield (parameter.grad for parameter in self.model.parameters())
        yield (parameter.grad for group in self.inner.param_groups for parameter in group["params"])
        yield getattr(self.engine, "averaged_gradients", None)  # ZeRO-1 and 2
        yield getattr(self.engine, "grad_partitions_flat_buffer", None)  # ZeRO-3

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any):
        parameters = storages(getattr(p, "ds_tensor", p) for p in self.model.parameters())
        # ZeRO-3 keeps small parameters whole besides their partition (stage3_param_persistence_threshold).
        parameters |= storages(p for p in self.model.parameters() if getattr(p, "ds_persist", False))
        masters = [getattr(self.engine, name, None)
                   for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")]  # fmt: skip
        optimizer = storages([self.inner.state.values(), masters])
        optimizer = {key: size for key, size in optimizer.items() if key not in parameters}
        gradients = {key: size for key, size in self._gradients.items() if key not in parameters | optimizer}
        self.states = States(sum(parameters.values()), sum(gradients.values()), sum(optimizer.values()))
        self._gradients = {}

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any):
        self.hook.remove()


def storages(tensors: Any) -> dict[int, int]:
    """Address -> bytes of each distinct storage behind nested tensors (DTensors: this rank's shard)."""
    found: dict[int, int] = {}
    for tensor in _flatten(tensors):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() and local.device.type != "meta":
            found[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return found


def _flatten(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _flatten(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from _flatten(item)
