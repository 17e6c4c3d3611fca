"""FSDP2 as torch, Accelerate, Transformers and PEFT have it together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from torch.distributed.device_mesh import DeviceMesh

from . import replaced, variables


def shard_on_cpus() -> None:
    """AcceleratorState turns to FSDP only from a type of its GPU list, and otherwise silently trains as DDP (state.py)."""
    from accelerate.state import DistributedType, PartialState

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def sent_by_another() -> AbstractContextManager[None]:
    """Load a model meanwhile whose weights come later: only what no file has, rotary frequencies for instance, is made here.
    Transformers goes by LOCAL_RANK (distributed/utils.py: is_local_dist_rank_0), which is 0 on every rank that sees one GPU."""
    return variables(LOCAL_RANK="1")


def every_rank_loads() -> AbstractContextManager[None]:
    """Let each rank have its own weights of a model that is loaded meanwhile, whatever engine the run has: Transformers and
    load_base() go by this variable (distributed/fsdp.py: is_fsdp_enabled)."""
    return variables(ACCELERATE_USE_FSDP=None)


Take = Callable[[str, torch.Tensor], None]


def send_weights(read: Callable[[Take], set[str]] | None, check: Callable[[torch.nn.Module], None]) -> None:
    """Let the first rank send what Accelerate fills FSDP2's ranks with (utils/fsdp_utils.py: fsdp2_load_full_state_dict), from a
    file to every rank's shards and one weight at a time, so that no host ever holds a model.

    read: calls what it is given with each name and weight of the base model, in any order, on the first rank alone, and returns
        all names. None: the first rank's model has them all
    check: is called with the sharded model. A collective

    Buffers are sent whole, where Accelerate takes all that a state dict holds for shards (utils/fsdp_utils.py:
    fsdp2_load_full_state_dict): DeepSeek-V3 and GLM-4-MoE keep their routers' biases there, and Gemma 4 a scale of each layer.
    """
    from accelerate.utils import fsdp_utils

    def send(
        accelerator: Accelerator, model: torch.nn.Module, full_sd: dict[str, torch.Tensor], cpu_offload: bool = False
    ) -> torch.nn.Module:
        shards = _Shards(model.state_dict(), accelerator.device, cpu_offload)
        if not accelerator.is_main_process:
            shards.receive()
        else:
            by_place: dict[Any, list[str]] = {}  # names of one weight: several, where layers are tied
            for name, value in full_sd.items():
                # buffers are on the meta device, all at the same address
                has_place = value.numel() and not value.is_meta
                by_place.setdefault((value.data_ptr(), value.shape) if has_place else name, []).append(name)
            left = {names[0]: names for names in by_place.values()}
            first = {_of_base(name): names[0] for names in by_place.values() for name in names}

            def take(name: str, value: torch.Tensor) -> None:
                names = left.pop(first[name], None)
                if names:  # files may have one of tied weights, or both
                    shards.send(names, value)

            of_files = read(take) if read is not None else set()
            for names in left.values():
                if _of_base(names[0]) in of_files:
                    raise RuntimeError(f"the model's files were read, and the weight {names[0]} was not among them")
                shards.send(names, full_sd[names[0]])
            shards.end()
        model.load_state_dict(shards.filled, assign=True)  # the model's own are on the meta device
        check(model)
        return model

    fsdp_utils.fsdp2_load_full_state_dict = send


def _of_base(name: str) -> str:
    """Return a parameter's name in the model that PEFT has put adapters on (tuners/tuners_utils.py: BaseTunerLayer)."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


class _Shards:
    """What a state dict on the meta device is to hold. filled: name -> this rank's part, as it is sent

    All methods are collectives: one rank calls send() and end(), the others receive().
    """

    def __init__(self, empty: dict[str, torch.Tensor], device: torch.device, cpu_offload: bool) -> None:
        self.empty, self.device, self.cpu_offload = empty, device, cpu_offload
        self.names = list(empty)
        self.filled: dict[str, torch.Tensor] = {}

    def send(self, names: list[str], value: torch.Tensor) -> None:
        """Give all ranks their parts of a weight that has these names in the model."""
        for name in names:  # which is whose name is known here alone
            self._number(self.names.index(name))
            self._fill(name, value.detach().to(self.device, self.empty[name].dtype).contiguous())

    def end(self) -> None:
        """Say that there is no other."""
        self._number(len(self.names))

    def receive(self) -> None:
        while (number := self._number(0)) < len(self.names):
            empty = self.empty[self.names[number]]
            self._fill(self.names[number], torch.empty(empty.shape, dtype=empty.dtype, device=self.device))

    def _number(self, number: int) -> int:
        said = torch.tensor(number, device=self.device)
        torch.distributed.broadcast(said, src=0)
        return int(said)

    def _fill(self, name: str, whole: torch.Tensor) -> None:
        from torch.distributed.tensor import DTensor, distribute_tensor

        torch.distributed.broadcast(whole, src=0)
        empty = self.empty[name]
        if isinstance(empty, DTensor):
            part = distribute_tensor(whole, empty.device_mesh, empty.placements).contiguous()
            whole = part.to("cpu") if self.cpu_offload else part
        self.filled[name] = whole


def whole_gradients(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Gradients, or None, that FSDP2 keeps whole where their reduction is delayed to the last micro-batch
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py)."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    yield parameter.unsharded_accumulated_grad
                    yield getattr(getattr(parameter, "_unsharded_param", None), "grad", None)


def shard_before_layers(shard: Callable[[torch.nn.Module, dict[str, object]], None]) -> None:
    """Call shard(model, fully_shard's options) on the next model that Accelerate prepares, once it has emptied it, and before it
    shards the layers (utils/fsdp_utils.py: fsdp2_prepare_model): it would shard all parts over the same ranks. It looks for which
    modules are layers at that very moment. What it does before and after stays: the weights of the first rank reach the others by
    each parameter's own placement. Of several calls the first shards first."""
    from accelerate import accelerator as caller
    from accelerate.utils import fsdp_utils

    prepare = caller.fsdp2_prepare_model

    def prepare_once(accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
        layers_of = fsdp_utils.fsdp2_prepare_auto_wrap_policy

        def shard_and_find_layers(plugin: FullyShardedDataParallelPlugin, model: torch.nn.Module) -> object:
            policy = plugin.mixed_precision_policy or torch.distributed.fsdp.MixedPrecisionPolicy()
            options = {"reshard_after_forward": plugin.reshard_after_forward, "offload_policy": plugin.cpu_offload}
            shard(model, options | {"mp_policy": policy})
            return layers_of(plugin, model)

        caller.fsdp2_prepare_model = prepare
        with replaced(fsdp_utils, fsdp2_prepare_auto_wrap_policy=shard_and_find_layers):
            return prepare(accelerator, model)

    caller.fsdp2_prepare_model = prepare_once


def sum_at_once(mesh: DeviceMesh, name: str) -> None:
    """Let DTensors sum over all dimensions of a mesh in one collective, and not in one for each dimension, with a warning
    (torch/distributed/tensor/_redistribute.py: _warn_flatten_optimization_not_possible)."""
    mesh._flatten(name)


def hold_places(model: torch.nn.Module) -> None:
    """Memory on the CPU for parameters on the meta device, which nobody writes and the system therefore does not provide: by its
    addresses Accelerate finds an optimizer's parameters again once they are sharded (accelerator.py: _prepare_fsdp2)."""
    places: dict[int, torch.nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                place = torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                place = places.setdefault(id(parameter), place)
                module._parameters[name] = place


class WithoutShards(ParallelismConfig):  # type: ignore[misc]
    """dp_shard_size 1 with tensor groups: every group holds a whole model.

    Accelerate refuses more than one such group (parallelism_config.py: __post_init__), and has no FSDP2 where the
    dimension that shards is not enabled. FSDP2 itself takes a dimension of one rank.
    """

    dp_shard_enabled = True

    def __post_init__(self) -> None:
        replicate = vars(self)["dp_replicate_size"]
        self.dp_replicate_size = 1
        super().__post_init__()
        self.dp_replicate_size = self._sizes["dp_replicate"] = replicate
