"""Tokens that are trained beside adapters (trainable_token_indices): their rows of both ends of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import UserError
from ..recipe.model_section import ModelSection
from ..recipe.settings import Settings
from ..recipe.value_types import fits_layer
from .location import location
from .new_tokens import read_tokenizer
from .sizes import parameter_count
from .tokenizer import load_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


KEY = "trainable_token_indices"


def token_ids(settings: Settings, words: int) -> list[int]:
    """Return the ids of the tokens that a recipe names, sorted, each once.

    words: size of the model's vocabulary
    Raises UserError for a text that is no single token of the run's tokenizer, and for an id beyond the vocabulary.
    """
    named = settings.recipe.model.trainable_token_indices
    if not named:
        return []
    place, ids = settings.place(KEY), set[int]()
    known = load_tokenizer(settings, words).get_vocab() if any(isinstance(token, str) for token in named) else {}
    for token in named:
        number = known.get(token) if isinstance(token, str) else token
        if number is None:
            problem = f"the tokenizer has no token {token!r}"
            like = sorted(other for other in known if other[:2] == str(token)[:2] and len(other) > 3)[:6]
            cure = (
                f"name tokens as its vocabulary does{', such as ' + ', '.join(like) if like else ''}, or by their ids"
            )
            raise UserError(place, problem, cure)
        if number >= words:
            problem = f"token {token!r} has the id {number}, and the model's vocabulary {words} tokens"
            raise UserError(place, problem, f"name tokens from 0 to {words - 1}")
        ids.add(number)
    return sorted(ids)


def of_ends(model: PreTrainedModel, ids: Sequence[int]) -> dict[str, list[int]] | None:
    """Return PEFT's trainable_token_indices: the ids for the name of the embeddings and, where it has weights of its own, for
    that of the output layer; None without ids."""
    if not ids:
        return None
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    ends = [inner] if outer is None or outer.weight is inner.weight else [inner, outer]
    return {names[id(end)]: list(ids) for end in ends}


def check(settings: Settings, model: PreTrainedModel) -> None:
    """Raise UserError for tokens that the tokenizer or the model does not have, and for ends whose rows cannot be replaced.

    model: without adapters; it may be empty
    """
    section, place = settings.recipe.model, settings.place(KEY)
    if not section.trainable_token_indices:
        return
    import torch

    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    ids = token_ids(settings, inner.num_embeddings)
    names = {id(module): name for name, module in model.named_modules()}
    for end in filter(None, (inner, outer)):
        name = names[id(end)]
        whole = [each for each in section.lora_modules_to_save if name == each or name.endswith(f".{each}")]
        if whole:
            raise UserError(place, f"lora_modules_to_save trains {whole[0]} whole already", "keep one of the two keys")
    if type(inner).forward is not torch.nn.Embedding.forward and not hasattr(inner, "embed_scale"):
        what = f"a {type(inner).__name__}, which does more than take rows"
        raise UserError(place, f"the embeddings of {type(model).__name__} are {what}", "use lora_modules_to_save")
    if inner.padding_idx in ids:
        problem = f"token {inner.padding_idx} is the padding of the model's embeddings, which gets no gradient"
        raise UserError(place, problem, "leave it out")
    if outer is not None and (type(outer).forward is not torch.nn.Linear.forward or outer.bias is not None):
        problem = f"the output layer of {type(model).__name__} ({type(outer).__name__}) is none that only multiplies"
        raise UserError(place, problem, "use lora_modules_to_save")
    targets = [] if section.lora_target_modules == "all-linear" else section.lora_target_modules
    if outer is not None and any(fits_layer(names[id(outer)], target) for target in targets):
        problem = "lora_target_modules puts an adapter on the output layer, whose rows would be trained"
        raise UserError(place, problem, "keep one of the two keys")


def describe_padding(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], model: PreTrainedModel) -> dict[str, str]:
    """Return a line on a padding token that samples have and whose input embedding gets no gradient, or {}.

    Transformers' models leave out the row of config.pad_token_id (padding_idx of torch.nn.Embedding), wherever the token stands.
    A tokenizer without a padding token of its own often names the token that ends a turn (SmolLM2, Qwen 2.5).

    ids: the tokens of a sample; model: it may be empty
    """
    inner = model.get_input_embeddings()
    padding = getattr(inner, "padding_idx", None)
    if padding is None or padding not in ids or not any(weight.requires_grad for weight in inner.parameters()):
        return {}
    token = tokenizer.convert_ids_to_tokens(padding)
    cure = "pad_token_id in the model's config.json may name a token that no sample has"
    return {"padding token": f"{token} stands in samples, and its input embedding is not trained (padding_idx); {cure}"}


def check_new(settings: Settings, model: PreTrainedModel) -> None:
    """Raise UserError where tokens that the recipe adds would never be trained: adapters leave the ends of a model as they are.

    model: without adapters; it may be empty
    """
    if not settings.recipe.model.adds_tokens:
        return
    tokenizer, new = read_tokenizer(settings, location(settings))
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    ends = {names[id(end)] for end in (inner, outer) if end is not None}
    whole = settings.recipe.model.lora_modules_to_save
    if all(any(fits_layer(end, wanted) for wanted in whole) for end in ends):
        return
    untrained = sorted({*new} - {*token_ids(settings, inner.num_embeddings)})
    if untrained:
        texts = ", ".join(repr(token) for token in tokenizer.convert_ids_to_tokens(untrained))
        problem = f"adapters leave the embeddings as they are, and {texts} would stay a mean of other tokens"
        raise UserError(settings.place(KEY), problem, f"add {texts} to {KEY}, which trains their rows")


def count(section: ModelSection, model: torch.nn.Module) -> tuple[int, int]:
    """Return (how many tokens have trained rows, how many parameters these are) in a model with adapters."""
    if not section.trainable_token_indices:
        return 0, 0
    from ..upstream import token_rows  # torch

    rows = [layer for _, layer in token_rows.layers(model)]
    tokens = len(next(iter(rows[0].token_indices.values())))
    return tokens, sum(parameter_count(delta) for delta in {layer.trainable_tokens_delta for layer in rows})
