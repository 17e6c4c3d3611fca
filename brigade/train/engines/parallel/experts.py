"""Expert parallelism: every rank of a group holds some experts of each layer whole, and tokens travel to them and back.

They travel by Transformers' all-to-all (distributed/expert_parallel.py: AllToAllEP), which autograd differentiates: an expert's
gradient is the sum over the tokens of its whole group. Ranks that hold the same experts, one of each group, shard them as FSDP2
shards everything else. The experts are divided along dimension 0 and their copies' shards along dimension 1: two divisions of one
dimension would make torch's _StridedShard, which torch cannot distribute unevenly, and which is not a Shard to code that
asks.

With tensor groups too, each expert stays whole: the ranks of a tensor group have the same tokens, and each sends a part of them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

from ...model.experts import shards
from ...upstream import are_experts, fsdp2
from ...upstream.experts import half_of

COPIES, DATA, EXPERTS, TENSOR = "expert_copies", "expert_data", "experts", "expert_tensor"  # dimensions of the meshes


@dataclass(frozen=True)
class Groups:
    """The ranks along which experts are divided.

    ranks: a mesh of three dimensions: copies of the same experts; ranks that shard a copy; ranks with all experts of a layer
        between them
    tokens: ranks that have the same tokens; averaged_over: the number of batches that gradients are the mean over
    """

    ranks: DeviceMesh
    tokens: DeviceMesh
    averaged_over: int

    @property
    def experts(self) -> DeviceMesh:
        return self.ranks[EXPERTS]

    @property
    def same(self) -> DeviceMesh:
        """The ranks with the same experts: those that shard them, after those that hold copies, if there are any."""
        return self.ranks[COPIES, DATA] if self.ranks[COPIES].size() > 1 else self.ranks[DATA]

    def owns(self, parameter: torch.nn.Parameter) -> bool:
        """Whether divide() has divided this parameter, and FSDP2 has not sharded it."""
        return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == (EXPERTS,)


def groups(device: str, world_size: int, size: int, averaged_over: int, copies: int = 1, tensor: int = 1) -> Groups:
    """Make groups of `size` neighbouring ranks with all experts between them, and across groups those with the same experts.

    copies: copies of all other parameters, or stages of a pipeline; ranks of two of them share no experts. But
        where one has fewer than `size` ranks, each group of `size` has a copy of the experts.
    tensor: neighbouring ranks that have the same tokens
    """
    data = shards(size, world_size // copies)
    shape = (world_size // size // data, data, size)
    ranks = init_device_mesh(device, shape, mesh_dim_names=(COPIES, DATA, EXPERTS))
    fsdp2.sum_at_once(ranks[DATA, EXPERTS], "expert_ranks")
    tokens = init_device_mesh(device, (world_size // tensor, tensor), mesh_dim_names=("expert_batches", TENSOR))
    return Groups(ranks, tokens[TENSOR], averaged_over)


def modules_of(model: torch.nn.Module, plan: Mapping[str, str]) -> Iterator[torch.nn.Module]:
    """Yield the modules that a model's plan calls experts, wherever other modules (PEFT's, for one) have wrapped it.

    plan: {"layers.*.mlp.experts": "ep_dispatch_experts", ...}, a config's base_model_ep_plan
    """
    names = [name for name, style in plan.items() if style == "ep_dispatch_experts"]
    wanted = [re.compile(r"(?:.*\.)?" + re.escape(name).replace(r"\*", r"\d+")) for name in names]
    for name, module in list(model.named_modules()):
        if are_experts(module) and any(pattern.fullmatch(name.replace(".base_layer", "")) for pattern in wanted):
            yield module


def divide(model: torch.nn.Module, plan: Mapping[str, str], ranks: Groups) -> Iterator[torch.nn.Module]:
    """Divide the experts of `model` over groups of ranks, in place; yields those of one layer after another."""
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel, MoEParamShard

    parts, dispatch = MoEParamShard(Shard(0), shards_expert_dim=True), EpDispatchExpertsParallel()
    for experts in modules_of(model, plan):
        for name in dict(experts.named_parameters(recurse=False)):
            parts.shard_param(experts, name, ranks.experts)
        wrappers = adapters_of(model, experts)
        if wrappers:
            _adapt(experts, wrappers, ranks.experts.get_local_rank())
        dispatch.install_forward(experts, ranks.experts, tp_mesh=ranks.tokens, ep_implementation="all_to_all")
        _send_in_half(experts)
        yield experts


def _send_in_half(experts: torch.nn.Module) -> None:
    """Let tokens travel in autocast's half type, in which experts compute; norms hand over fp32, twice the bytes."""
    plain = experts.forward

    def forward(hidden_states: torch.Tensor, *args: object) -> torch.Tensor:
        half = half_of(hidden_states.device.type)
        return plain(hidden_states.to(half or hidden_states.dtype), *args).to(hidden_states.dtype)

    experts.forward = forward


def shard(model: torch.nn.Module, plan: Mapping[str, str], ranks: Groups, options: Mapping[str, Any]) -> None:
    """Divide the experts, and shard what a rank then has of them. Call it before fully_shard sees the layers around them.

    options: of fully_shard, without the mesh
    """
    # Experts are an FSDP2 unit of their own, but numbers keep the precision that they have in the layers around.
    options = {**options, "mp_policy": replace(options["mp_policy"], cast_forward_inputs=False)}
    for experts in divide(model, plan, ranks):
        fully_shard(experts, mesh=ranks.same, shard_placement_fn=lambda _: Shard(1), **options)
        _average(experts, ranks)


def adapters_of(model: torch.nn.Module, experts: torch.nn.Module) -> list[torch.nn.Module]:
    """Return PEFT's wrappers around these experts, one for each parameter with adapters, the outermost first."""
    return [m for m in model.modules() if hasattr(m, "get_delta_factors") and m.get_base_layer() is experts]


def _adapt(experts: torch.nn.Module, wrappers: list[torch.nn.Module], group_rank: int) -> None:
    """Let experts add their adapters to their weights when these have been gathered.

    PEFT would add them before FSDP2 has gathered the weights, and for all experts. The adapters themselves belong to the layer
    around, and are whole on each rank while it computes: gradients of other ranks' experts are zero here, so the sum over all
    ranks is right. In a tensor group they are DTensors, and a rank's gradient is a part of the group's sum.
    """
    plain, number, deltas = experts.forward, experts.num_experts, {}
    own = slice(group_rank * number, (group_rank + 1) * number)

    def adapted(hidden_states: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        for wrapper in wrappers:
            *factors, scale = wrapper.get_delta_factors(wrapper.active_adapters[0])
            left, right = (_local(factor)[own] for factor in factors)
            deltas[wrapper.parameter_name] = left, right, scale
        return experts(hidden_states, *args, **options)

    def forward(*args: object) -> torch.Tensor:
        held = {name: experts._parameters[name] for name in deltas}
        for name, (left, right, scale) in deltas.items():
            weight = held[name]
            experts._parameters[name] = torch.baddbmm(
                weight, left.to(weight.dtype), right.to(weight.dtype), alpha=scale
            )
        try:
            return plain(*args)
        finally:
            experts._parameters.update(held)

    wrappers[0].forward, experts.forward = adapted, forward


def _local(factor: torch.Tensor) -> torch.Tensor:
    return factor.to_local(grad_placements=[Partial()]) if isinstance(factor, DTensor) else factor


def _average(experts: torch.nn.Module, ranks: Groups) -> None:
    """Make gradients the means over all batches, as those of the layers around are.

    A rank's gradient of its experts is already a sum over its group's batches, and FSDP2 reduces it only over the ranks with the
    same experts. A divisor other than their number would go to NCCL as PREMUL_SUM, which in some releases makes bf16 zero
    (pytorch/pytorch#190747): so sum, and divide afterwards. A single shard reduces nothing, but divides too.
    """
    experts.set_gradient_divide_factor(float(ranks.averaged_over))
    if ranks.same.size(-1) > 1:
        experts.set_force_sum_reduction_for_comms(True)
