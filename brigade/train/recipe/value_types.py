"""The types of a recipe's values that need more than Python's own: how a text becomes a list, a number or a table.

Where a validator raises ValueError, its text says what is wanted: the user reads `KEY: VALUE is not TEXT`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from ...errors.tables import Document, Fields

# A number to everyone but YAML 1.1, which reads it as text: it wants a point in a number, and a sign in its exponent.
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def _numbers(value: object) -> object:
    """The value of a table, with texts like `1e-7` and `1.5e8` turned into numbers."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _numbers_of_table(table: object) -> object:
    try:
        return _numbers(table)
    except RecursionError:  # a YAML alias to itself
        raise ValueError("a table that has an end") from None


def _rates(table: Document) -> dict[str, float]:
    """Learning rates by patterns of names."""
    for pattern, rate in table.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"a table of regular expressions: {pattern!r} is none ({error})") from None
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < float("inf"):
            raise ValueError(f"a table of learning rates above 0: {pattern!r} has {rate!r}")
    return {pattern: float(rate) for pattern, rate in table.items()}


def _yarn(rope: Fields) -> Fields:
    """What stretches a rotary embedding (model/rope.py)."""
    factor: Any = rope.get("factor")
    original: Any = rope.get("original_max_position_embeddings")
    sizes = type(factor) in (int, float) and 1 <= factor < 1e6 and type(original) is int and original > 0
    if rope.get("rope_type") != "yarn" or not sizes or len(rope) > 3:
        raise ValueError("{rope_type: yarn, factor: NUMBER, original_max_position_embeddings: TOKENS}")
    return rope


def _profile(given: Fields) -> Fields:
    """Which steps are traced (watch/profile.py), with what is not said."""
    whole: dict[str, Any] = {"start": 10, "steps": 3, "ranks": [0], "memory": False} | given
    ranks = whole["ranks"] if isinstance(whole["ranks"], list) else [whole["ranks"]]
    counts = all(type(count) is int and count >= 0 for count in [whole["start"], whole["steps"], *ranks])
    if (
        len(whole) > 4
        or type(whole["memory"]) is not bool
        or not counts
        or 0 in (whole["start"], whole["steps"])
        or not ranks
    ):
        raise ValueError(
            "{start: STEP, steps: NUMBER, ranks: [RANK, ...], memory: true or false}, each of which may be left out"
        )
    return whole | {"ranks": ranks}


@dataclass(frozen=True)
class Recomputation:
    """What the backward pass computes again, as `activation_checkpointing` says it.

    layers: every so many-th layer is checkpointed, 0 for none; selective: it keeps what its costly products gave
    offload: what a checkpointed layer begins with waits in host memory
    """

    layers: int = 0
    selective: bool = False
    offload: bool = False

    @property
    def plain(self) -> bool:
        """Whether each layer keeps what it begins with, and nothing else."""
        return self == Recomputation(1)


def recomputation(value: object) -> Recomputation:
    """Return what a value of `activation_checkpointing` asks for."""
    if isinstance(value, dict):
        return Recomputation(value["every_n"])
    return Recomputation(int(bool(value)), selective=value == "selective", offload=value == "offload")


def _checkpointing(value: object) -> object:
    """A value of `activation_checkpointing`; a text that says true or false is one."""
    value = {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
    every = value.get("every_n") if isinstance(value, dict) and len(value) == 1 else None
    if not (isinstance(value, bool) or value in ("selective", "offload") or (type(every) is int and every > 1)):
        raise ValueError("true, false, selective, offload or {every_n: LAYERS}, with 2 or more of them")
    return value


def _steps(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("a number of steps from 1, or -1 (num_train_epochs decides)")
    return value


def _steps_or_share(value: float) -> float:
    if value > 1 and value % 1:
        raise ValueError("a whole number of steps, or below 1 a share of all steps")
    return value


def _pairs(value: str) -> str:
    names = re.findall(r"(\w+)=", value)
    if not re.fullmatch(r"\w+=[^,=]+(,\w+=[^,=]+)*", value) or len({*names}) < len(names):
        raise ValueError("name=value, or several with commas between them, each name once: name=value,name=value")
    return value


def _words(value: object) -> object:
    return value.replace(",", " ").split() if isinstance(value, str) else value


def _some_words(value: object) -> object:
    words = _words(value)
    if words == []:
        raise ValueError("a list of at least one part")
    return words


def _words_or_none(value: object) -> object:
    return [] if value in (None, "none", ["none"]) else _words(value)


def _tokens(value: object) -> object:
    """Texts and ids of tokens; digits are an id."""
    words = _words_or_none([value] if isinstance(value, int) and not isinstance(value, bool) else value)
    if not isinstance(words, list):
        return words
    if any(isinstance(word, bool) for word in words):  # pydantic would take true for 1
        raise ValueError(
            "a list of texts and ids of tokens: without quotation marks YAML reads yes and no as true and false"
        )
    return [int(word) if isinstance(word, str) and word.isascii() and word.isdigit() else word for word in words]


T = TypeVar("T")


def _new_tokens(tokens: list[str]) -> list[str]:
    if not all(token and token == token.strip() for token in tokens) or len({*tokens}) < len(tokens):
        raise ValueError("a list of texts, none empty or with blanks at its ends, and each once")
    return _characters(tokens)


def _characters(tokens: list[T]) -> list[T]:
    """Texts that a tokenizer takes: a flag's bytes may be no letter, and JSON may hold half of a pair that makes one."""
    if any("\ud800" <= letter <= "\udfff" for token in tokens if isinstance(token, str) for letter in token):
        raise ValueError(r"a list of texts in UTF-8, without half a surrogate pair (\ud800 to \udfff)")
    return tokens


def _words_or_all(value: object) -> object:
    words = value if value == "all-linear" else _words(value)
    if isinstance(words, list):
        check_patterns(word for word in words if isinstance(word, str))
    return words


def _by_pattern(table: Fields) -> Fields:
    check_patterns(table)
    return table


def _words_or_experts(value: object) -> object:
    return value if value == "experts" else _words_or_none(value)


def _not_empty(value: object) -> object:
    if value == []:
        raise ValueError("a list of at least one source")
    return value


def _one_column_each(value: dict[str, str | list[str]]) -> dict[str, str | list[str]]:
    if any(isinstance(name, list) for key, name in value.items() if key != "ignore"):
        raise ValueError("one name for each column; only ignore takes a list")
    ignored = value.get("ignore", [])
    named = [name for key, name in value.items() if key != "ignore"]
    named += [ignored] if isinstance(ignored, str) else dict.fromkeys(ignored)
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice:
        raise ValueError(f"a table that names each column once: {twice!r} stands for two")
    return value


Positive = Annotated[int, Field(ge=1)]
AtLeastZero = Annotated[float, Field(ge=0)]
Checkpointing = Annotated[
    bool | Literal["selective", "offload"] | dict[Literal["every_n"], int], BeforeValidator(_checkpointing)
]
Steps = Annotated[int, AfterValidator(_steps)]
StepsOrShare = Annotated[AtLeastZero, AfterValidator(_steps_or_share)]
Pairs = Annotated[str, AfterValidator(_pairs)]
Table = Annotated[dict[str, Any], AfterValidator(_numbers_of_table)]
Profile = Annotated[Table, AfterValidator(_profile)]
Rates = Annotated[Table, AfterValidator(_rates)]
Yarn = Annotated[Table, AfterValidator(_yarn)]
Words = Annotated[list[str], BeforeValidator(_words_or_none)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)] | str], BeforeValidator(_tokens), AfterValidator(_characters)]
NewTokens = Annotated[Words, AfterValidator(_new_tokens)]
ModelParts = Annotated[list[Literal["vision_tower", "projector", "language"]], BeforeValidator(_some_words)]
LinearLayers = Annotated[list[str] | Literal["all-linear"], BeforeValidator(_words_or_all)]
Ranks = Annotated[dict[str, Annotated[int, Field(ge=1)]], AfterValidator(_by_pattern)]
Alphas = Annotated[dict[str, Annotated[float, Field(gt=0)]], AfterValidator(_by_pattern)]
ExpertParameters = Annotated[list[str] | Literal["experts"], BeforeValidator(_words_or_experts)]
Trackers = Annotated[
    list[Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab"]], BeforeValidator(_words_or_none)
]
Column = Literal[
    "messages", "prompt", "completion", "text", "tools", "system", "input", "history", "functions", "chat_template_kwargs",
    "chosen", "rejected", "label", "weight", "images", "image", "ignore",
]  # fmt: skip
Columns = Annotated[dict[Column, str | list[str]], AfterValidator(_one_column_each)]
not_empty = BeforeValidator(_not_empty)


# ---- names of layers: the end of a name, or a regular expression for it ----------------------------------------------
_METACHARACTERS = frozenset("\\^$*+?[](){}|")  # a dot is in ordinary names too


def is_pattern(name: str) -> bool:
    """Whether a name is a regular expression: it has another metacharacter than a dot."""
    return not _METACHARACTERS.isdisjoint(name)


def fits_layer(layer: str, name: str) -> bool:
    """Whether a layer of the model is meant: by its whole name, or by its end after a dot (PEFT's get_pattern_key)."""
    if is_pattern(name):
        return re.match(rf"(.*\.)?({name})$", layer) is not None
    return layer == name or layer.endswith(f".{name}")


def check_patterns(names: Iterable[str]) -> None:
    """Raise ValueError for a regular expression that is none."""
    for name in names:
        try:
            re.compile(name)
        except re.error as error:
            raise ValueError(f"names of layers, or regular expressions: {name!r} is none ({error})") from None
