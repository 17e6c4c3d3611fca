"""Tokens that a recipe adds to its model (add_tokens, add_special_tokens), in the tokenizer and the configuration. The weights
get their rows in grown.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...errors import UserError, first_line
from ..data import tokenizer_trial
from ..data.builtin import BUILT_IN, TOKENIZER
from ..host.hub import hub_is_away, refusal
from ..recipe import remote_code
from ..recipe.settings import Settings
from .config_json import grown_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


KEY, SPECIAL = "add_tokens", "add_special_tokens"
WITHIN_A_WORD = "##"  # what WordPiece writes before a piece that begins no word
BLANKS = ("▁",)  # which T5's has too


class NewTokens(NamedTuple):
    """Tokens that the model does not have yet. ids: of each, sorted; words: size of the vocabulary before, size: with them"""

    ids: list[int]
    words: int
    size: int


def read_tokenizer(settings: Settings, location: str) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """Return the tokenizer of the model at `location` with the tokens that the recipe adds, and the ids of those that it lacked.

    Raises UserError where there is no tokenizer, and for a new token that would change how other text is read.
    """
    from transformers import AutoTokenizer

    model, place = settings.recipe.model, settings.place("tokenizer_name_or_path")
    name = model.tokenizer_name_or_path or location
    if name == BUILT_IN:
        name = str(TOKENIZER)
    if not Path(name).is_dir():
        hub_is_away()
    # The model's revision is not another repository's.
    revision = None if model.tokenizer_name_or_path else model.revision
    tokenizer_trial.check(name, place, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=model.trust_remote_code)
    except Exception as error:
        if remote_code.is_refused(error):
            raise remote_code.refusal(place, [name], revision) from None
        why, cure = (first_line(error), "") if Path(name).is_dir() else refusal(error, name, revision=revision)
        cure = cure or f"name a tokenizer, or `{BUILT_IN}` for the built-in one"
        raise UserError(place, f"no tokenizer at {name!r}: {why}", cure) from None
    if is_made_up(tokenizer):
        problem = f"no tokenizer at {name!r}: without its files Transformers makes one up, of {len(tokenizer)} tokens"
        raise UserError(place, problem, f"name a tokenizer, or `{BUILT_IN}` for the built-in one")
    had = tokenizer.get_vocab()
    for key, tokens in (KEY, model.add_tokens), (SPECIAL, model.add_special_tokens):
        for token in tokens:
            _check_new(tokenizer, token, settings.place(key))
    both = sorted({*model.add_tokens} & {*model.add_special_tokens})
    if both:
        raise UserError(settings.place(SPECIAL), f"{both[0]!r} stands in {KEY}, too", "name it in one of them")
    # Those that are there already are not added: they would lose that they are special, or how they take blanks beside them.
    known = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
    tokenizer.add_tokens([token for token in model.add_tokens if token not in known])
    tokenizer.add_tokens([token for token in model.add_special_tokens if not known.get(token)], special_tokens=True)
    new = {token: number for token, number in tokenizer.get_vocab().items() if token not in had}
    for token, number in new.items():
        ids = tokenizer.encode(token, add_special_tokens=False)
        if number not in ids:
            place = settings.place(KEY if token in model.add_tokens else SPECIAL)
            problem = f"the tokenizer never writes {token!r}: it reads it as {tokenizer.convert_ids_to_tokens(ids)}"
            raise UserError(place, problem, "name a text that holds no other token, nor is one in other letters")
    return tokenizer, sorted(new.values())


def is_made_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer has only special tokens: Transformers makes one like that for the model types of some config.json
    (gemma2, cohere) where there are no tokenizer files."""
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab(), *BLANKS}
    return special.issuperset(tokenizer.get_vocab())


def _check_new(tokenizer: PreTrainedTokenizerBase, token: str, place: str) -> None:
    """Raise UserError at `place` for a token that the tokenizer writes already as a part of other texts, and for one that holds
    a token of its own. A reserved entry, which it writes for no text, may become a token.

    An added token is cut out of all text, before anything else is read: "the" would divide "then" and "other".
    """
    added = {str(known): number for number, known in tokenizer.added_tokens_decoder.items()}
    if token in added:
        return
    held = next((known for known in added if known in token), None)
    if held:
        problem = f"{token!r} holds {held!r}, a token of the tokenizer, which it would replace wherever both stand"
        raise UserError(place, problem, "name a text without it")
    number = tokenizer.get_vocab().get(token)
    alone = tokenizer.encode(token, add_special_tokens=False)
    texts = (f"a{token}", f" {token}", f"{token}a", f"a{token.removeprefix(WITHIN_A_WORD)}")
    around = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    is_word = number is not None and any(number in ids for ids in (alone, *around))
    is_spelled = number is not None and tokenizer.decode([number]) != token  # "Ġthe" stands for " the"
    if (len(alone) == 1 and alone[0] != tokenizer.unk_token_id) or is_word or is_spelled:
        number = alone[0] if number is None else number
        problem = f"{token!r} is in the vocabulary (id {number}): as an added token it would be cut out of all text that has it"
        raise UserError(place, problem, f"leave it out, or name a text of its own: <{token.strip()}>")


def grow(settings: Settings, location: str, config: PreTrainedConfig) -> NewTokens | None:
    """Give a configuration a vocabulary that holds the recipe's new tokens, in place. Returns what is new, or None.

    location: where the model is; config: as it is published
    Raises UserError for a tokenizer that has more tokens than the model without them.
    """
    if not settings.recipe.model.adds_tokens:
        return None
    ids, text = read_tokenizer(settings, location)[1], config.get_text_config()
    if not ids:
        return None
    words = text.vocab_size
    if ids[0] > words:
        place = settings.place("tokenizer_name_or_path")
        problem = f"the tokenizer has {ids[0]} tokens before new ones, but the model's vocabulary {words}"
        raise UserError(place, problem, "name the model's own tokenizer")
    text.vocab_size = grown_vocabulary(words, ids[-1] + 1)
    return NewTokens(ids, words, text.vocab_size)


def describe(settings: Settings, location: str) -> dict[str, str]:
    """Return a line on the tokens that a recipe adds, or {}. location: where the model is"""
    section = settings.recipe.model
    if not section.adds_tokens:
        return {}
    tokenizer, ids = read_tokenizer(settings, location)
    named = len(section.add_tokens) + len(section.add_special_tokens)
    if not ids:
        return {"new tokens": "none: the tokenizer has them all"}
    how = "at random, as all" if section.from_scratch else f"as the mean of {ids[0]:,} others"
    texts = ", ".join(tokenizer.convert_ids_to_tokens(ids))
    return {"new tokens": f"{len(ids)} of {named} that the recipe names ({texts}), whose rows begin {how}"}
