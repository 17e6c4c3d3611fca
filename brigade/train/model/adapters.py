"""LoRA (PEFT) and QLoRA (bitsandbytes): what a recipe asks for, what a model offers, and the model with adapters on it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UserError, first_line
from ...errors.console import counted, millions
from .. import upstream
from ..recipe.images import LANGUAGE
from ..recipe.method import method_name
from ..recipe.model_section import ModelSection
from ..recipe.objectives import objective_of
from ..recipe.settings import Settings
from ..recipe.value_types import fits_layer, is_pattern
from ..upstream.experts import beside_mamba, taken_for_experts
from . import adapter_weights, parts, token_rows
from .location import location
from .sizes import empty_model, half_or_full, parameter_count, untaught

if TYPE_CHECKING:
    import torch
    from peft.peft_model import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


ALL_LINEAR, EXPERTS = "all-linear", "experts"


def describe(section: ModelSection, model: PreTrainedModel) -> dict[str, str]:
    """Return {"method": "LoRA r 16 on q_proj, v_proj: 0.10% of 8,037,076,992 parameters are trained"}, or {} without adapters."""
    if not section.use_peft:
        return {}
    everywhere, experts = section.lora_target_modules == ALL_LINEAR, ""
    on = "all linear layers" if everywhere else ", ".join(section.lora_target_modules)
    on += f" of {', '.join(section.lora_parts).replace('_', ' ')}" if section.lora_parts != [LANGUAGE] else ""
    reached = parts.adapted(model, section.lora_parts).values()
    own = [parameter for module in reached for parameter in module.parameters(recurse=False)]
    adapted = target_parameters(section, model)
    if adapted:
        on += f", {', '.join(adapted)}"
    elif any(len(getattr(p, "ds_shape", p.shape)) == 3 and not p.requires_grad for p in own):
        experts = "; experts are no linear layers and stay as they are"
    if everywhere:
        layers = linear_layers(model, section.lora_parts)
        plain = [layer for layer in layers if ".base_layer" not in layer and ".lora_" not in layer]
        taken = sorted(taken_for_experts(model.get_base_model(), plain))
        if taken:
            experts += f", and so do {', '.join(taken)}, which PEFT takes for them"
        refused = sorted(beside_mamba(model.get_base_model(), plain))
        if refused:
            stay = "stays as it is" if len(refused) == 1 else "stay as they are"
            experts += f"; {', '.join(refused)} of Mamba's layers {stay}, because they are read past an adapter"
    total, trained = parameter_count(model), parameter_count(model, trained=True)
    copies = [module for path, module in model.named_modules() if path.endswith(".modules_to_save.default")]
    whole = sum(parameter_count(module, trained=True) for module in copies)
    tokens, rows = token_rows.count(section, model)
    share = f"{trained / total:.2%} of {total:,} parameters are trained{experts}"
    states = [getattr(parameter, "quant_state", None) for parameter in model.parameters()]
    if any(states):  # not in a model that stands for a pipeline's, without memory
        share += f"; {sum(state.shape.numel() for state in states if state) / total:.0%} of them are in 4 bits"
    what = trains(trained - whole - rows, whole, section.lora_modules_to_save, tokens, rows)
    ranks = "".join(f", {rank} on {pattern}" for pattern, rank in section.rank_pattern.items())
    return {"method": f"{method_name(section)} r {section.lora_r}{ranks} on {on} {what}: {share}"}


def trains(adapters: int, whole: int, modules: list[str], tokens: int = 0, rows: int = 0) -> str:
    """Return `trains 42 M in adapters + 1,051 M in embed_tokens and lm_head, because lora_modules_to_save names them`.

    adapters: parameters in adapters; whole: parameters in `modules`, which are trained whole; rows: those of so many `tokens`
    """
    text = f"trains {millions(adapters)} in adapters"
    if tokens:
        text += f" + {millions(rows)} in the embeddings of {counted(tokens, 'token')}"
    if not modules and tokens:
        return text
    if not modules:
        return f"{text} only"
    return f"{text} + {millions(whole)} in {' and '.join(modules)}, because lora_modules_to_save names them"


def untrained_chat_tokens(
    section: ModelSection, tokenizer: PreTrainedTokenizerBase, ids: Any, model: PreTrainedModel
) -> dict[str, str]:
    """Return a line on the chat's tokens that adapters on a base model do not train, or {}.

    A tokenizer without a chat template is a base model's: its weights may never have seen the special tokens of a chat, as Llama
    3's have not (unsloth #915, torchtune #2429). ids: the tokens of a sample
    """
    whole = section.lora_modules_to_save
    if not section.use_peft or section.from_scratch or whole or tokenizer.chat_template:
        return {}
    usual = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    special = {n: str(token) for n, token in tokenizer.added_tokens_decoder.items() if token.special and n not in usual}
    taught = {
        tokenizer.convert_tokens_to_ids(token) if isinstance(token, str) else token
        for token in section.trainable_token_indices
    }
    used = [special[number] for number in sorted(special.keys() & {int(number) for number in ids} - taught)]
    if not used:
        return {}
    ends = {end.weight for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    more = sum(getattr(weight, "ds_shape", weight.shape)[-1] for weight in ends) * len(used)
    cure = f"trainable_token_indices: [{', '.join(used)}] trains them, {millions(more)} parameters more; "
    cure += "chat_template: tulu has ordinary words instead"
    return {"chat tokens": f"{', '.join(used)}: a base model may not have learned them, and adapters do not; {cure}"}


def linear_layers(model: torch.nn.Module, of: Sequence[str] = (LANGUAGE,)) -> list[str]:
    """Return the names of the layers in these parts of a model that adapters fit: linear, the output layer included."""
    import torch
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, Conv1D)
    reached = parts.adapted(model, of)
    return [name for name, module in reached.items() if isinstance(module, kinds) and _only_multiplies(module)]


def _only_multiplies(layer: torch.nn.Module) -> bool:
    """Whether a layer computes only the product that an adapter beside it would: an architecture's own class may make a router of
    a linear layer (Llama 4), or multiply groups separately (DeepSeek-V4's o_a_proj)."""
    import torch

    kind = type(layer)
    if not kind.__module__.startswith(("transformers.models.", "transformers_modules.")):
        return True
    twin = upstream.without_parameters(layer)  # ZeRO-3 may have taken them away
    with torch.device("meta"), suppress(Exception):
        twin.weight = torch.nn.Parameter(torch.empty(layer.out_features, layer.in_features))
        result = twin(torch.empty(3, 5, layer.in_features))
        return isinstance(result, torch.Tensor) and result.shape == (3, 5, layer.out_features)
    return False


def target_parameters(section: ModelSection, model: torch.nn.Module) -> list[str] | None:
    """Return the names by which PEFT finds the parameters that get adapters (`experts.gate_up_proj`), sorted as PEFT does; or
    None."""
    if section.lora_target_parameters != EXPERTS:
        return sorted(section.lora_target_parameters) or None
    return sorted(fused_experts(model)) or None


def fused_experts(model: torch.nn.Module) -> set[str]:
    """Return the names of experts' weights, each with its module's: those of shape (experts, rows, columns), and no biases."""

    return {
        f"{_last(path.replace('.base_layer', ''))}.{name}"
        for path, module in model.named_modules()
        if upstream.are_experts(module)
        for name, parameter in module.named_parameters(recurse=False)
        if len(getattr(parameter, "ds_shape", parameter.shape)) == 3
    }


def check_targets(settings: Settings, config: PreTrainedConfig) -> None:
    """Compare lora_target_modules and lora_modules_to_save with the model's own names, before weights are loaded.

    Raises UserError, which lists what the model has, where a name fits nothing that adapters can be put on.
    """
    section = settings.recipe.model
    if not section.use_peft:
        return
    model = empty_model(settings, config)
    place, name = settings.place("lora_target_modules"), type(model).__name__
    layers, modules = linear_layers(model, section.lora_parts), parts.adapted(model, section.lora_parts)
    for part in section.lora_parts:
        if not linear_layers(model, [part]):
            problem = f"the {part.replace('_', ' ')} of {name} has no linear layer that an adapter fits"
            raise UserError(settings.place("lora_parts"), problem, f"leave {part} out")
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if section.load_in_4bit:
        language = [model.get_submodule(layer) for layer in linear_layers(model)]
        _check_quantises(settings, name, {type(layer) for layer in language if layer not in ends})
    targets = [] if section.lora_target_modules == ALL_LINEAR else section.lora_target_modules
    taken, past = taken_for_experts(model, layers), beside_mamba(model, layers)
    cure = (
        f"its linear layers: {_grouped(layer for layer in layers if _last(layer) not in taken | past)}; or {ALL_LINEAR}"
    )
    for target in targets:
        if not any(fits_layer(layer, target) for layer in layers):
            fused = next((path for path, _ in model.named_parameters() if fits_layer(path, target)), None)
            other = next((path for path in modules if fits_layer(path, target)), None)
            reason = f"{other} is a {type(modules[other]).__name__}" if other else "nothing in the model is called so"
            reason = f"{fused} is one parameter for all experts" if fused else reason
            raise UserError(place, f"{target!r} fits no linear layer of {name}: {reason}", cure)
        if any(fits_layer(layer, target) and _last(layer) in past for layer in layers):
            raise UserError(
                place, f"kernels of {name}'s Mamba layers read the weight of {target!r} past an adapter", cure
            )
    for part in section.lora_parts if targets else ():
        own = linear_layers(model, [part])
        if not any(fits_layer(layer, target) for layer in own for target in targets):
            problem = f"none of {', '.join(map(repr, targets))} fits a linear layer of the {part.replace('_', ' ')}"
            raise UserError(
                place,
                f"{problem}, which lora_parts names",
                f"its linear layers: {_grouped(own)}; or leave {part} out of lora_parts",
            )
    for wanted in section.lora_modules_to_save:
        if not any(fits_layer(module, wanted) for module in modules):
            with_weights = [path for path, module in modules.items() if [*module.parameters(recurse=False)]]
            problem = f"{wanted!r} fits no module of {name}"
            raise UserError(settings.place("lora_modules_to_save"), problem, f"its modules: {_grouped(with_weights)}")
    if ends[1] is not None and ends[0].weight is ends[1].weight:
        paths = [path for path, module in modules.items() if module in ends]
        for key, named in (("lora_target_modules", targets), ("lora_modules_to_save", section.lora_modules_to_save)):
            hit = next((wanted for wanted in named if any(fits_layer(end, wanted) for end in paths)), None)
            if hit:
                problem = f"{hit!r} shares its weight with the model's other end (tie_word_embeddings): "
                problem += "trained apart, the two could not be saved as one"
                raise UserError(settings.place(key), problem, "leave it out")
    token_rows.check(settings, model)
    token_rows.check_new(settings, model)
    _check_patterns(settings, [name for name in layers if _gets_adapter(section, model, name, past | taken)])
    asked = _check_parameters(settings, model)
    try:
        wrapped = wrap(model, settings, "")
    except ValueError as error:
        if asked and "ParamWrapper" in str(error):  # dropout, DoRA
            place, cure = settings.place("lora_target_parameters"), "leave that key out, or lora_target_parameters"
        raise UserError(place, f"PEFT refuses: {first_line(error)}", cure) from None
    if set(wrapped.peft_config["default"].target_parameters or ()) != asked:
        raise UserError(place, "PEFT takes some of these names for fused experts, which are no linear layers", cure)
    adapter_weights.check(wrapped, settings)


def _gets_adapter(section: ModelSection, model: PreTrainedModel, layer: str, left_out: Collection[str]) -> bool:
    """Whether a linear layer gets an adapter. left_out: ends of names that all-linear leaves out"""
    if section.lora_target_modules == ALL_LINEAR:
        return _last(layer) not in left_out and model.get_submodule(layer) is not model.get_output_embeddings()
    return any(fits_layer(layer, target) for target in section.lora_target_modules)


def _check_patterns(settings: Settings, adapted: Sequence[str]) -> None:
    """Raise UserError for a key of rank_pattern or alpha_pattern that decides nothing. adapted: layers that get adapters"""
    section = settings.recipe.model
    for key in ("rank_pattern", "alpha_pattern"):
        table, place = getattr(section, key), settings.place(key)
        if table and section.lora_target_parameters:
            raise UserError(place, "nobody has compared it with adapters on fused experts", "leave one of the two out")
        first = {next((pattern for pattern in table if fits_layer(layer, pattern)), None) for layer in adapted}
        if section.adapter_name_or_path:  # whose own patterns these are
            continue
        idle = next((pattern for pattern in table if pattern not in first), None)
        if idle:
            hit = any(fits_layer(layer, idle) for layer in adapted)
            problem = f"{idle!r} fits no layer with an adapter" + " that no pattern before it fits" * hit
            raise UserError(place, problem, "put it first" if hit else f"layers with adapters: {_grouped(adapted)}")


def _check_parameters(settings: Settings, model: torch.nn.Module) -> set[str]:
    """Return the parameters that lora_target_parameters names. Raises UserError for one that the model does not have."""
    section, place = settings.recipe.model, settings.place("lora_target_parameters")
    asked = set(target_parameters(section, model) or ())
    fused = fused_experts(model)
    cure = f"its experts': {', '.join(sorted(fused))}; or {EXPERTS}" if fused else "leave it out"
    if section.lora_target_parameters and not fused:
        raise UserError(place, f"{type(model).__name__} has no fused experts", cure)
    odd = next((target for target in sorted(asked) if target not in fused), None)
    if odd:
        raise UserError(place, f"{odd!r} fits no weights of experts in {type(model).__name__}", cure)
    return asked


def _check_quantises(settings: Settings, model: str, kinds: set[type]) -> None:
    """Raise UserError where Transformers would hand none of the model's layers to bitsandbytes: it takes torch's own Linear, but
    no class derived from it, such as FalconLinear (integrations/bitsandbytes.py: replace_with_bnb_linear)."""
    import torch
    from transformers.pytorch_utils import Conv1D

    if not any(kind is torch.nn.Linear or issubclass(kind, Conv1D) for kind in kinds):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        problem = f"no layer of {model} would be in 4 bits: bitsandbytes takes torch's Linear; they are {names}"
        raise UserError(settings.place("load_in_4bit"), problem, "train adapters without load_in_4bit")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _grouped(names: Iterable[str]) -> str:
    """Return `q_proj (28), k_proj (28), ...`: the last parts of the names, and how many modules have each."""
    return ", ".join(f"{name} ({count})" for name, count in Counter(map(_last, names)).items())


def wrap(model: PreTrainedModel, settings: Settings, source: str) -> PeftModel:
    """Return a PeftModel: `model` with its weights frozen and adapters on it. They begin with the same numbers on every rank and
    strategy.

    source: where the weights came from. The adapters' directory names it as their base; a model of the Hub, by its name there.
    """
    import torch
    from transformers.integrations import is_deepspeed_zero3_enabled

    from ..upstream import peft_layers  # imports torch, and lint and plan read what stands above
    from ..upstream import token_rows as rows_of_peft

    peft = peft_layers.import_peft()
    section = settings.recipe.model
    targets: Any = section.lora_target_modules
    layers = linear_layers(model, section.lora_parts)
    if targets == ALL_LINEAR:  # PEFT's own takes MoE's fused experts and routers in (docs/methods.md)
        head, taken = model.get_output_embeddings(), taken_for_experts(model, layers) | beside_mamba(model, layers)
        targets = [name for name in layers if model.get_submodule(name) is not head and _last(name) not in taken]
    elif untaught(model) or any(map(is_pattern, targets)):  # a vision tower has a q_proj too
        targets = [name for name in layers if any(fits_layer(name, target) for target in targets)]
    rows = token_rows.of_ends(model, token_rows.token_ids(settings, model.config.get_text_config().vocab_size))
    lora = peft.LoraConfig(
        # As a classifier's, the head is trained whole beside the adapters, and saved with them.
        task_type="SEQ_CLS" if objective_of(settings.recipe.training).scores else "CAUSAL_LM",
        **section.model_dump(include={"lora_alpha", "rank_pattern", "alpha_pattern"}),
        r=section.lora_r,
        lora_dropout=section.lora_dropout,
        target_modules=targets,
        target_parameters=target_parameters(section, model),
        modules_to_save=section.lora_modules_to_save or None,
        trainable_token_indices=rows,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
    )
    with torch.random.fork_rng(devices=[]), rows_of_peft.rows_of_shards():
        torch.manual_seed(settings.recipe.training.seed)
        wrapped: Any = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    rows_of_peft.compute_by_rows(wrapped)
    # DeepSpeed makes them what its configuration says, with a master copy in fp32; under ZeRO-3 it takes them as they are
    # (engine.py: _cast_module_mixed_precision), and an embedding in fp32 would hand fp32 to layers in bf16.
    dtype = half_or_full(settings) if is_deepspeed_zero3_enabled() else torch.float32
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    # With new tokens, `source` is made of the model, and lies in a cache.
    base = source if section.from_scratch or not section.adds_tokens else location(settings)
    here = section.from_scratch or Path(location(settings)).is_dir()
    adapter = wrapped.peft_config["default"]
    adapter.base_model_name_or_path = str(Path(base).resolve()) if here else section.model_name_or_path
    adapter.revision = None if here else section.revision
    # PEFT's own choice asks the Hub at each save, and writes whole embeddings where the base has fewer rows.
    wrapped.save_pretrained = functools.partial(wrapped.save_pretrained, save_embedding_layers=False)
    return wrapped
