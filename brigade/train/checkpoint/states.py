"""What training keeps for each parameter, read slice by slice from a checkpoint of any engine on any number of ranks.

Parameters go by their names in the model, and a slice is a range of the flattened whole parameter. So each rank that continues
reads its own share, whatever the shares were when the checkpoint was written. Files are mapped or read in part, never written.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import UserError, first_line
from ...errors.disk import of_disk
from ..model import load_trained
from ..model.base_files import stored_in
from ..upstream import unpickling
from . import saved_weights
from .chunks import Chunks
from .manifest import ONE, engine_of, tag_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHT = "weight"  # beside the names that the optimizer gives its own: exp_avg, exp_avg_sq, momentum_buffer


class States:
    """The states in one checkpoint. sizes: elements of each parameter"""

    sizes: Mapping[str, int]

    def moments_of(self, name: str) -> tuple[str, ...]:
        """Names of what the optimizer keeps for every element of a parameter; some keep not the same of all (Muon)."""
        raise NotImplementedError

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor:
        """Elements start..stop of a parameter's WEIGHT (its fp32 master copy) or of one of its moments; 1-D, on the CPU."""
        raise NotImplementedError

    def step(self, name: str) -> float | None:
        """The number of steps that the optimizer has made with a parameter; None where it does not count them."""
        raise NotImplementedError

    def buffer(self, name: str) -> Tensor | None:
        """A buffer, which the model keeps beside its parameters; None where it is not saved."""
        raise NotImplementedError

    def loss_scale(self) -> float | None:
        """The loss scale of fp16; None where the engine does not keep it in its states."""
        return None


def of_checkpoint(folder: Path, order: Sequence[str], saved_as: Mapping[str, str]) -> States:
    """The states in a checkpoint-N.

    order: names of the trained parameters, in the order of an unsharded optimizer
    saved_as: a parameter's name -> its name among saved weights, where that differs (adapters)

    Raises UserError where they cannot be read, and where a file could run code when it is loaded.
    """
    engine = engine_of(folder)
    with telling(folder):
        if engine == "DeepSpeed":
            return _zero(folder, saved_as)
        return _Whole(folder, order, saved_as) if engine == ONE else _Sharded(folder, saved_as)


@contextmanager
def telling(folder: Path) -> Iterator[None]:
    """Read states from a checkpoint inside. Raises UserError where they are not what an engine writes."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = f"what training keeps cannot be read from it: {type(error).__name__}: {first_line(error)}"
        raise of_disk(error) or UserError(str(folder), problem, "continue from another checkpoint") from None


def _zero(folder: Path, saved_as: Mapping[str, str]) -> States:
    tag = tag_of(folder)
    names = " ".join(file.name for file in tag.iterdir())
    parts = [_Zero(tag, part) for part in range(len(set(re.findall(r"mp_rank_(\d+)", names))))]
    if len(parts) == 1:
        return parts[0]
    whole = _whole_shapes(folder)
    return Divided(parts, {name: whole[saved_as.get(name, name)] for name in parts[0].sizes}, parts[0].shapes)


class _Whole(States):
    """States of one process or DDP: safetensors, and optimizer.pt in the optimizer's own order."""

    def __init__(self, folder: Path, order: Sequence[str], saved_as: Mapping[str, str]) -> None:
        from safetensors import safe_open

        files = sorted(folder.glob(saved_weights.FULL)) or [folder / saved_weights.ADAPTER]
        opened = [safe_open(file, framework="pt") for file in files]
        self._file = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (no mapping)
        self._saved_as = saved_as
        self._fused: dict[str, Tensor] = {}
        if (
            any(saved_as.get(name, name) not in self._file for name in order)
            and not (folder / saved_weights.ADAPTER).is_file()
        ):
            self._fused = load_trained.under_other_names(folder, set(self._file), set(order))
        kept = unpickling.load(folder / "optimizer.pt", map_location="cpu", mmap=True)
        self._group = kept["param_groups"][0]
        self._state = {order[number]: state for number, state in kept["state"].items()}
        names = [name for name in order if name in self._fused or saved_as.get(name, name) in self._file]
        self._shapes = {name: self._weight(name).shape for name in names}
        self.sizes = {name: shape.numel() for name, shape in self._shapes.items()}

    def moments_of(self, name: str) -> tuple[str, ...]:
        found = {key: each for key, each in self._state.get(name, {}).items() if torch.is_tensor(each) and each.dim()}
        shape = self._shapes[name]
        for key, each in found.items():  # of an optimizer that numbered parameters in another order, for one
            if each.shape != shape:
                raise ValueError(f"{key} of {name} has the shape {tuple(each.shape)}, and the weight {tuple(shape)}")
        return tuple(found)

    def _weight(self, name: str) -> Tensor:
        if name in self._fused:
            return self._fused[name]
        saved = self._saved_as.get(name, name)
        return self._file[saved].get_tensor(saved)

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor:
        whole = self._weight(name) if key == WEIGHT else self._state[name][key]
        return whole.reshape(-1)[start:stop]

    def step(self, name: str) -> float | None:
        step = self._state.get(name, {}).get("step", self._group.get("step"))
        return None if step is None else float(step)

    def buffer(self, name: str) -> Tensor | None:
        return self._file[name].get_tensor(name) if name in self._file else self._fused.get(name)


@torch.no_grad()
def complete(model: "PreTrainedModel", folder: Path) -> None:
    """Load into a model what the files of a checkpoint of one process or DDP hold under other names: load_state_dict() has passed
    over it without an error (transformers/trainer.py: _load_from_checkpoint, strict=False)."""
    from safetensors import safe_open

    files = sorted(folder.glob(saved_weights.FULL))
    if not files or engine_of(folder) != ONE:
        return
    state, in_files = model.state_dict(), set[str]()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            in_files |= {*opened.keys()}
    if state.keys() - in_files - model.all_tied_weights_keys.keys():
        with telling(folder):
            for name, tensor in load_trained.under_other_names(folder, in_files).items():
                state[name].copy_(tensor)


class _Zero(States):
    """States of ZeRO-1, 2 and 3. Each rank's file holds flat slices: in stages 1 and 2 of a group's parameters laid end to end
    (stage_1_and_2.py: state_dict), in stage 3 of each parameter by itself (stage3.py: _rigid_state_dict)."""

    def __init__(self, tag: Path, part: int) -> None:
        """part: the rank in a tensor group"""
        files = sorted(
            tag.glob(f"*mp_rank_{part:02d}_optim_states.pt"),
            key=lambda file: [int(n) for n in re.findall(r"\d+", file.name)],
        )
        self._ranks = [_mapped(file)["optimizer_state_dict"] for file in files]
        self._model = _mapped(min(tag.glob(f"*mp_rank_{part:02d}_model_states.pt")))
        first, groups = self._ranks[0], self._model["param_shapes"]
        self._each_by_itself = first["zero_stage"] == 3
        self._masters = "fp32_flat_groups" if self._each_by_itself else "single_partition_of_fp32_groups"
        self._moments = "optimizer_state_dict" if self._each_by_itself else "base_optimizer_state"
        self.shapes = {name: tuple(shape) for shapes in groups for name, shape in shapes.items()}
        self.sizes: dict[str, int] = {}
        self._place: dict[str, tuple[int, int]] = {}  # name -> group, offset in it
        for number, shapes in enumerate(groups):
            sizes = [shape.numel() for shape in shapes.values()]
            if self._each_by_itself:
                takes = [-(-size // len(files)) for size in sizes]
            else:
                paddings = first.get("param_alignment_paddings") or [[0] * len(sizes)] * len(groups)
                takes = [size + padding for size, padding in zip(sizes, paddings[number], strict=True)]
            for name, size, offset in zip(shapes, sizes, accumulate([0, *takes]), strict=False):
                self.sizes[name], self._place[name] = size, (number, offset)

    def moments_of(self, name: str) -> tuple[str, ...]:
        first, number = self._ranks[0], self._place[name][0]
        padding = 0 if self._each_by_itself else first["group_paddings"][number]
        state = first[self._moments]["state"].get(number, {})
        size = first[self._masters][number].numel() + padding
        return tuple(
            key for key, each in state.items() if torch.is_tensor(each) and each.dim() and each.numel() == size
        )

    def _flat(self, rank: int, number: int, key: str) -> Tensor:
        held = self._ranks[rank]
        return held[self._masters][number] if key == WEIGHT else held[self._moments]["state"][number][key]

    def _pieces(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(rank, start, stop in its slice of the group) of the pieces that make up elements start..stop."""
        number, offset = self._place[name]
        if self._each_by_itself:
            share, begin = -(-self.sizes[name] // len(self._ranks)), 0
        else:
            share = self._ranks[0][self._masters][number].numel() + self._ranks[0]["group_paddings"][number]
            begin, offset = offset, 0
        start, stop = begin + start, begin + stop
        while start < stop:
            rank = start // share
            end = min(stop, (rank + 1) * share)
            yield rank, offset + start - rank * share, offset + end - rank * share
            start = end

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor:
        number = self._place[name][0]
        pieces = [self._flat(rank, number, key)[a:b] for rank, a, b in self._pieces(name, start, stop)]
        return torch.cat(pieces) if pieces else torch.empty(0)

    def step(self, name: str) -> float | None:
        state = self._ranks[0][self._moments]["state"].get(self._place[name][0], {})
        return float(state["step"]) if "step" in state else None

    def buffer(self, name: str) -> Tensor | None:
        return self._model["module"][name] if name in self._model["buffer_names"] else None

    def loss_scale(self) -> float | None:
        scaler = self._ranks[0].get("loss_scaler")
        return None if scaler is None else float(scaler.loss_scale)


class Divided(States):
    """States of a model that DeepSpeed divided over tensor groups: parameters are put together from their parts.

    parts: the states of a group's first rank, its second, and so on
    whole, local: shape of each parameter, whole and in a part. A part is shorter along one dimension, or all parts are the same.
    """

    def __init__(
        self, parts: Sequence[States], whole: Mapping[str, tuple[int, ...]], local: Mapping[str, tuple[int, ...]]
    ):
        self._parts, self._whole = parts, whole
        self.sizes = {name: prod(whole[name]) for name in parts[0].sizes}
        self._along = {
            name: next((n for n, (a, b) in enumerate(zip(local[name], whole[name], strict=True)) if a != b), None)
            for name in self.sizes
        }

    def moments_of(self, name: str) -> tuple[str, ...]:
        return self._parts[0].moments_of(name)

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor:
        along = self._along[name]
        if along is None:
            return self._parts[0].read(name, key, start, stop)
        if along == 0:  # one part after the other
            size = self.sizes[name] // len(self._parts)
            edges = [(max(start - n * size, 0), min(stop - n * size, size)) for n in range(len(self._parts))]
            pairs = zip(self._parts, edges, strict=True)
            pieces = [part.read(name, key, first, last) for part, (first, last) in pairs if first < last]
            return torch.cat(pieces) if pieces else torch.empty(0)
        row = self._whole[name][1]
        first, last, width = start // row, -(-stop // row), row // len(self._parts)
        columns = [part.read(name, key, first * width, last * width).view(-1, width) for part in self._parts]
        return torch.cat(columns, dim=1).reshape(-1)[start - first * row : stop - first * row]

    def step(self, name: str) -> float | None:
        return self._parts[0].step(name)

    def buffer(self, name: str) -> Tensor | None:
        return self._parts[0].buffer(name)

    def loss_scale(self) -> float | None:
        return self._parts[0].loss_scale()


def _whole_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights in the Hugging Face files of a checkpoint, by their headers."""
    files = sorted(folder.glob(saved_weights.FULL)) or [folder / saved_weights.ADAPTER]
    return {name: each.shape for file in files for name, each in stored_in(file).items()}


def _mapped(file: Path) -> Any:
    return unpickling.load(file, map_location="cpu", mmap=True)


class _Sharded(States):
    """States of FSDP2 and HSDP: torch's distributed checkpoints, of which only the overlapping chunks are read."""

    def __init__(self, folder: Path, saved_as: Mapping[str, str]) -> None:
        self._weights, self._optimizer = Chunks(folder / "pytorch_model_fsdp_0"), Chunks(folder / "optimizer_0")
        self._saved_as = saved_as
        back = {saved: name for name, saved in saved_as.items()}
        weights = {str(path[1]): shape for path, shape in self._weights.shapes.items()}
        self.sizes = {back.get(name, name): shape.numel() for name, shape in weights.items()}
        self._kept: dict[str, tuple[str, ...]] = {}
        for (_, part, *path), shape in self._optimizer.shapes.items():
            if part == "state" and shape and shape.numel() == self.sizes.get(path[0]):
                self._kept[path[0]] = (*self.moments_of(path[0]), path[1])

    def moments_of(self, name: str) -> tuple[str, ...]:
        return self._kept.get(name, ())

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor:
        if key == WEIGHT:
            return self._weights.read(("model", self._saved_as.get(name, name)), start, stop)
        return self._optimizer.read(("optimizer", "state", name, key), start, stop)

    def step(self, name: str) -> float | None:
        counted: tuple[Any, ...] = ("optimizer", "state", name, "step")
        if counted in self._optimizer.shapes:
            return float(self._optimizer.read(counted, 0, 1))
        return self._common_step

    @cached_property
    def _common_step(self) -> float | None:
        """The steps of an optimizer that counts once for all parameters (LAMB, LARS)."""
        return self._optimizer.value(("optimizer", "param_groups", 0, "step"))

    def buffer(self, name: str) -> Tensor | None:
        path = ("model", name)
        shape = self._weights.shapes.get(path)
        return None if shape is None else self._weights.read(path, 0, shape.numel()).view(shape)
