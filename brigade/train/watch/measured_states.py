"""Model states in bytes, from the tensors that this rank really holds: parameters, gradients, optimizer states."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from ..upstream import fsdp2

# Attributes of DeepSpeed's ZeRO optimizers (runtime/zero/stage_1_and_2.py and stage3.py) that hold gradients ...
_GRADIENTS = (
    "all_grad_tensors",  # ZeRO-1 and 2: accumulated over micro-batches, of whole parameters where a slice cuts them
    "averaged_gradients",  # ZeRO-1, 2 and 3: reduced, and not yet in the optimizer's precision
    "accumulated_grads_in_cpu",  # ZeRO-1 and 2 with offload_optimizer
    "grad_partitions_flat_buffer",  # ZeRO-3, at all times
)
# ... and the master copy of the parameters: of ZeRO-1 and 2, of ZeRO-3.
_MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")


@dataclass(frozen=True)
class States:
    """Bytes on one rank, and of what.

    optimizer: moments and, where the engine keeps one, the fp32 master copy of the parameters
    on_host: how many of all bytes lie in the host's memory; all of them where there is no GPU
    half: trained parameters are held in two bytes each
    shapes: of the trained parameters before they are sharded over the data's ranks, in the model's order
    frozen: (shape, bytes per element) of the whole others, as they are held: 4-bit weights in their containers
    """

    parameters: int
    gradients: int
    optimizer: int
    on_host: int = 0
    half: bool = False
    shapes: tuple[tuple[int, ...], ...] = ()
    frozen: tuple[tuple[tuple[int, ...], int], ...] = ()

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


class StateBytes(TrainerCallback):
    """`states` holds the figures of the newest optimizer step.

    Gradients come and go: counted is the most that their tensors hold at one moment, of the ends of all micro-batches
    and the steps of the optimizer (ZeRO-3 steps once per sub-group). What lives only within a backward pass is not a
    model state here: buckets on their way through the network, gathered layers, one gradient on its way into a bucket.
    """

    def __init__(self) -> None:
        self.states: States | None = None
        self._gradients: dict[Any, int] = {}

    def on_train_begin(
        self,
        args: object,
        state: object,
        control: object,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        **_: object,
    ):
        self.model, self.engine = model, getattr(optimizer, "optimizer", optimizer)
        self.inner = getattr(self.engine, "optimizer", self.engine)  # DeepSpeed wraps the optimizer once more
        self._step_hook = self.inner.register_step_pre_hook(lambda *_: self._see_gradients())

    def on_substep_end(self, args: object, state: object, control: object, **_: object):
        self._see_gradients()

    def _see_gradients(self) -> None:
        others = self._parameters() | self._optimizer()  # a buffer may serve for two: count it once
        now = {key: size for key, size in storages(self._gradient_tensors()).items() if key not in others}
        self._gradients = max(self._gradients, now, key=lambda found: sum(found.values()))

    def _gradient_tensors(self) -> Iterator[torch.Tensor]:
        yield (parameter.grad for parameter in self.model.parameters())
        yield (master.grad for master in self._masters())
        yield (getattr(self.engine, name, None) for name in _GRADIENTS)
        yield from fsdp2.whole_gradients(self.model)

    def _masters(self) -> list[torch.Tensor]:
        return [master for name in _MASTERS for master in getattr(self.engine, name, ())]

    def _parameters(self) -> dict[tuple[str, int], int]:
        parameters = list(self.model.parameters())
        found = storages(getattr(parameter, "ds_tensor", parameter) for parameter in parameters)
        found |= storages(getattr(parameter, "ds_secondary_tensor", None) for parameter in parameters)  # ZeRO++'s hpZ
        # ZeRO-3 keeps small parameters whole besides their partition (stage3_param_persistence_threshold).
        return found | storages(parameter for parameter in parameters if getattr(parameter, "ds_persist", False))

    def _optimizer(self) -> dict[tuple[str, int], int]:
        return storages([self.inner.state.values(), self._masters()])

    def on_step_end(self, args: object, state: object, control: object, **_: object):
        parameters = self._parameters()
        optimizer = {key: size for key, size in self._optimizer().items() if key not in parameters}
        found = (parameters, self._gradients, optimizer)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        others = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        self.states = States(
            parameters=sum(parameters.values()),
            gradients=sum(self._gradients.values()),
            optimizer=sum(optimizer.values()),
            on_host=sum(size for part in found for (device, _), size in part.items() if device == "cpu"),
            half=trained[0].element_size() == 2,
            shapes=tuple(_shape(parameter) for parameter in trained),
            frozen=tuple((_shape(parameter), parameter.element_size()) for parameter in others),
        )
        self._gradients = {}

    def on_train_end(self, args: object, state: object, control: object, **_: object):
        self._step_hook.remove()
        del self.model, self.engine, self.inner  # the run's figures stay, its memory does not


class OneStep(StateBytes):
    """The states of one optimizer step, watched from the end of the one before. A run does not end for a figure's sake."""

    def __init__(self, *begun: Any, **given: object) -> None:
        super().__init__()
        self.failed = False
        with self._guarded():
            self.on_train_begin(*begun, **given)

    def _see_gradients(self) -> None:
        with self._guarded():  # the optimizer's step calls it
            super()._see_gradients()

    def end(self, *step: Any) -> tuple[int, int, int]:
        """Bytes of parameters, gradients and optimizer on this rank; zeros where they cannot be told."""
        with self._guarded():
            self.on_step_end(*step)
        with self._guarded():
            self.on_train_end(*step)
        found = None if self.failed else self.states
        return (found.parameters, found.gradients, found.optimizer) if found else (0, 0, 0)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.failed = True


def _shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the whole parameter, or of the part that a tensor group gives to each of its ranks."""
    shape = list(getattr(parameter, "ds_shape", parameter.shape))
    names = (isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names) or ()
    if "tp" in names:
        number = names.index("tp")
        placement = parameter.placements[number]
        if not placement.is_replicate():
            shape[placement.dim] //= parameter.device_mesh.size(number)
    return tuple(shape)


def storages(tensors: object) -> dict[tuple[str, int], int]:
    """(device type, address) -> bytes of each distinct storage behind nested tensors (DTensors: this rank's shard)."""
    found: dict[tuple[str, int], int] = {}
    for tensor in _flatten(tensors):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes() and local.device.type != "meta":
            found[local.device.type, storage.data_ptr()] = storage.nbytes()
    return found


def _flatten(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _flatten(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from _flatten(item)
