"""The tokenizer of a run's model, and the size of the model's vocabulary."""

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UserError
from ..data import tokenizer_trial
from ..recipe.settings import Settings
from .location import check_length, load_config, location
from .new_tokens import is_made_up, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def load_tokenizer(settings: Settings, words: int) -> "PreTrainedTokenizerBase":
    """Load the tokenizer, with the recipe's new tokens and a padding token. Raises UserError where there is none, or it has more
    tokens than `words`, those of the model's vocabulary with the new ones."""
    model, place = settings.recipe.model, settings.place("tokenizer_name_or_path")
    tokenizer, _ = read_tokenizer(settings, location(settings))
    name = tokenizer.name_or_path
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        added = [token.content for token in tokenizer.added_tokens_decoder.values()]
        ends = [token for token in added if "end" in token or token == "</s>"]
        problem = (
            f"the tokenizer at {name!r} has neither a padding token nor one that ends a text (pad_token, eos_token)"
        )
        cure = f'write "eos_token": "{ends[-1] if ends else "..."}" into its tokenizer_config.json, or name another'
        raise UserError(place, problem, cure)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.tokenizer_name_or_path and not model.from_scratch:
        _check_belongs(settings, tokenizer)
    if len(tokenizer) > words:
        problem = f"{name!r} has {len(tokenizer)} tokens, but the model's vocabulary {words}"
        raise UserError(place, problem, "name the model's own tokenizer")
    return tokenizer


def saved_tokenizer(
    settings: Settings, config: "PreTrainedConfig", source: Path, output: Path
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer in the checkpoint, or else in the run's directory: FSDP2's checkpoints hold none."""
    from transformers import AutoTokenizer

    for folder in (source, output):
        if (folder / "tokenizer_config.json").is_file():
            tokenizer_trial.check(folder, str(folder))
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=settings.recipe.model.trust_remote_code)
    return load_tokenizer(settings, config.get_text_config().vocab_size)


def _check_belongs(settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise UserError where a tokenizer of another name gives the model's own tokens other ids: its embeddings would
    mean something else. It may have further tokens."""
    from transformers import AutoTokenizer

    model, place = settings.recipe.model, location(settings)
    tokenizer_trial.check(place, settings.place("model_name_or_path"), model.revision)
    try:
        own = AutoTokenizer.from_pretrained(place, revision=model.revision, trust_remote_code=model.trust_remote_code)
    except Exception:  # a model without a tokenizer of its own
        return
    if is_made_up(own):
        return
    given, wanted = tokenizer.get_vocab(), own.get_vocab()
    moved = next((token for token, number in wanted.items() if given.get(token) != number), None)
    if moved is not None:
        problem = f"{model.tokenizer_name_or_path!r} does not belong to {model.model_name_or_path!r}: "
        problem += f"token {moved!r} is {wanted[moved]} there, and here {given.get(moved, 'missing')}"
        raise UserError(settings.place("tokenizer_name_or_path"), problem, "leave the key out to take the model's own")


def vocabulary(settings: Settings) -> int:
    """Return the number of tokens of the model's vocabulary, after the checks of load_config().

    It is read from config.json itself where that says it: building a Transformers configuration imports torch, a second that
    tokenising does not need.
    """
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    try:
        document, _ = PreTrainedConfig.get_config_dict(location(settings), revision=settings.recipe.model.revision)
        words = (document.get("text_config") or document).get("vocab_size")
        positions = document.get("max_position_embeddings")
    except Exception:  # load_config() says what is wrong
        document, words, positions = {}, None, None
    known = document.get("model_type") in CONFIG_MAPPING_NAMES and "auto_map" not in document
    known = known and not settings.recipe.model.rope_parameters and not settings.recipe.model.adds_tokens
    if not known or not isinstance(words, int) or not isinstance(positions, int | None):
        return load_config(settings).get_text_config().vocab_size
    check_length(settings, positions)
    return words
