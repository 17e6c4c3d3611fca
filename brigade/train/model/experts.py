"""The experts of a model, as its config tells: how many there are, and whether they can be divided over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...errors import UserError
from ..recipe.settings import Settings
from ..upstream.experts import balances, routing_biases
from .sizes import empty_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def count(config: PreTrainedConfig) -> int:
    """Return the number of experts in a layer, or 0."""
    text = config.get_text_config()
    return next((n for key in _COUNTS if isinstance(n := getattr(text, key, None), int) and n > 1), 0)


def plan(config: PreTrainedConfig) -> Mapping[str, str]:
    """Return which modules are experts, as Transformers plans: {"layers.*.mlp.experts": "ep_dispatch_experts", ...}."""
    return getattr(config.get_text_config(), "base_model_ep_plan", None) or {}


def router_loss_coef(settings: Settings, config: PreTrainedConfig) -> float:
    """Return the weight of the routers' loss in training: the recipe's, else the config's own where it asks for that loss."""
    text, of_recipe = config.get_text_config(), settings.recipe.training.router_aux_loss_coef
    if of_recipe is not None:
        return of_recipe
    if not getattr(text, "output_router_logits", False):
        return 0.0
    # JetMoE has another name for it: what nobody knows here is refused (check_router_loss), and not left out.
    return float(getattr(text, "router_aux_loss_coef", 1.0) or 0.0)


def without_router_loss(config: PreTrainedConfig) -> dict[str, bool]:
    """Return what a forward pass is told so that it does not add its own loss for its routers, which is of a micro-batch."""
    return {"output_router_logits": False} if getattr(config.get_text_config(), "output_router_logits", False) else {}


def check_router_loss(settings: Settings, config: PreTrainedConfig, stages: int) -> None:
    """Raise UserError where the routers' loss is asked for and cannot be computed. stages: of the pipeline"""
    training = settings.recipe.training
    key = "model_name_or_path" if training.router_aux_loss_coef is None else "router_aux_loss_coef"
    cure = "set router_aux_loss_coef: 0; logs say how evenly tokens go to experts (expert_balance)"
    for wrong, problem in (
        (not balances(config), f"Transformers has no loss for the routers of {config.get_text_config().model_type}"),
        (stages > 1, "the routers' loss needs all layers together, and each stage of a pipeline has some"),
        (training.torch_compile, "the routers' loss reads what routers compute, which torch_compile hides"),
        (
            training.tiled_mlp,
            "the routers' loss reads what routers compute for whole sequences, and tiled_mlp divides them",
        ),
        (
            training.sync_every,
            "the routers' loss is one of a whole step, and with sync_every replicas have parts of it",
        ),
    ):
        if wrong:
            raise UserError(settings.place(key), problem, cure)


def check_router_bias(settings: Settings, config: PreTrainedConfig, kind: str, stages: int) -> None:
    """Raise UserError where routers' biases are to be updated and cannot be. kind: of the strategy; stages: of the pipeline"""
    recipe, model = settings.recipe, config.get_text_config().model_type
    for wrong, problem in (
        (
            stages > 1,
            "each stage of a pipeline has some layers, and no step of its own at whose end they are",
        ),
        (recipe.training.torch_compile, "the update counts what routers choose, which torch_compile hides"),
        (
            recipe.training.tiled_mlp,
            "the update counts what routers choose for whole sequences, and tiled_mlp divides them",
        ),
        (
            recipe.training.sync_every,
            "the update is by the tokens of a whole step, of which replicas with sync_every have parts",
        ),
        (recipe.model.use_peft, "the biases belong to the model, and adapters would be saved without them"),
    ):
        if wrong:
            _refuse_update(settings, problem)
    biases = routing_biases(empty_model(settings, config))
    if not biases:
        _refuse_update(settings, f"the routers of {model} have no bias in Transformers")
    if any(bias.experts is None for bias in biases):
        _refuse_update(settings, f"the biases of {model} are not one number for each of a layer's fused experts")
    if kind == "zero3" and any(bias.is_parameter for bias in biases):
        _refuse_update(settings, f"the biases of {model} are parameters, which ZeRO-3 shards", "use FSDP2 or ZeRO-2")


def _refuse_update(settings: Settings, problem: str, otherwise: str = "") -> None:
    cure = otherwise or "leave it out; logs say how evenly tokens go to experts (expert_balance)"
    raise UserError(settings.place("router_bias_update_rate"), problem, cure)


def shards(size: int, ranks: int) -> int:
    """Return over how many ranks the holders of the same experts shard them.

    size: ranks that hold all experts between them; ranks: those that share one copy of all other parameters. Where the latter is
        no multiple of the former, each group of `size` has a copy of the experts.
    """
    return 1 if ranks % size else ranks // size


def check(settings: Settings, config: PreTrainedConfig, size: int, ranks: int, world_size: int, place: str) -> None:
    """Raise UserError where experts cannot be divided over groups of `size` ranks.

    ranks: as of shards(); place: where `size` is set
    """
    name, number = settings.recipe.model.model_name_or_path, count(config)
    if not number:
        raise UserError(place, f"{name} has no experts", "remove the key")
    if "ep_dispatch_experts" not in plan(config).values():
        problem = f"Transformers has no plan (base_model_ep_plan) for the experts of {type(config).__name__}"
        raise UserError(place, problem, "remove the key: FSDP2 shards experts as it shards all else")
    if number % size:
        fits = ", ".join(str(n) for n in range(2, number + 1) if number % n == 0 and world_size % n == 0)
        raise UserError(place, f"{number} experts do not divide over {size} ranks", f"set it to one of: {fits or 1}")
    parts = shards(size, ranks)
    for path, parameter in empty_model(settings, config).named_parameters():
        if ".experts." in path and parameter.dim() > 1 and parameter.shape[1] % parts:
            problem = (
                f"{parts} ranks hold the same experts, and cannot divide the {parameter.shape[1]} rows of {path} evenly"
            )
            raise UserError(place, problem, f"set it to a larger divisor of {number}, or start another number of ranks")
