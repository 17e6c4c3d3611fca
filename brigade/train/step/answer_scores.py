"""How good a generated answer is, compared with the reference: the recipe's `answer_score`, in training and in `brigade eval`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import UserError, first_line
from ..data.rows import BadRow
from ..data.tool_calls import ARGUMENTS, calls_of
from ..recipe.objectives import SCORES
from ..recipe.program import own_function
from ..recipe.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Score = Callable[[str, str], float]  # of an answer, by the reference


UNREADABLE = (ValueError, RecursionError, BadRow)


def text(answer: str, reference: str) -> float:
    """Return 1 where both are the same text."""
    return float(answer == reference)


def tool_call(answer: str, reference: str) -> float:
    """Return 1 where both call the same functions with the same arguments, in the same order, or where neither calls any; else
    0."""
    try:
        return float(calls(answer) == calls(reference))
    except UNREADABLE:
        return 0.0


def fields(answer: str, reference: str) -> float:
    """Return the share of the reference's fields that the answer has with the same values. Each field of a nested object counts;
    a list is one value."""
    try:
        given, wanted = (dict(_leaves(_single(each))) for each in (answer, reference))
    except UNREADABLE:
        return 0.0
    return sum(given.get(path) == value for path, value in wanted.items()) / len(wanted)


def calls(said: str) -> list[str]:
    """Return the tool calls of a text from its thoughts on, each as JSON in one form: objects, or lists of them, with a name and
    arguments by one of their usual names, whichever tags stand around them, or what stands in tags of _TAGS. Raises one of
    UNREADABLE for what looks like one and is none."""
    said = _spoken(said)
    for begin, *tags in _TAGS:
        count = len(begin.findall(said))
        if count:
            return _in_tags(said, count, *tags)
    found = [each for value in _values(said) for each in (value if isinstance(value, list) else [value])]
    written = [
        each for each in found if isinstance(each, dict) and any(key in each for key in ("function", *ARGUMENTS))
    ]
    return [_same(call["function"]) for each in written for call in calls_of(each, "a call", set())]


def _spoken(said: str) -> str:
    return said[said.rfind("</think>") + 1 :]


def _in_tags(said: str, count: int, call: re.Pattern[str], argument: re.Pattern[str]) -> list[str]:
    """Return `count` calls of a text whose arguments stand in tags. Raises ValueError for one that breaks off or holds more."""
    found = call.findall(said)
    if len(found) != count or any(argument.sub("", inside).strip() for _, inside in found):
        raise ValueError("a call breaks off")
    given = [(name, argument.findall(inside)) for name, inside in found]
    return [_same({"name": name, "arguments": {key: _argument(value) for key, value in each}}) for name, each in given]


def _argument(written: str) -> Any:
    """Return an argument in tags: texts stand there as they are, and everything else as JSON."""
    try:
        value = _JSON.decode(written)
    except ValueError:
        return written.strip()
    return written.strip() if isinstance(value, str) else value


def _values(said: str) -> Iterator[Any]:
    """Yield the objects and lists of JSON in a text. Raises ValueError for an object that breaks off."""
    at = 0
    while begin := _BEGINS.search(said, at):
        try:
            value, at = _JSON.raw_decode(said, begin.start())
        except ValueError:
            if _OBJECT.match(said, begin.start()):  # other braces are prose, or code
                raise
            at = begin.end()
        else:
            yield value


def _single(said: str) -> Any:
    (value,) = _values(_spoken(said))  # ValueError where there are none, or several
    return value


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, _same(value)


def _same(value: Any) -> str:
    """Return one text for values that are the same in JSON: keys in any order, 1 and 1.0; but true is not 1."""
    return json.dumps(_JSON.decode(json.dumps(value)), sort_keys=True)


def _number(digits: str) -> float:
    number = float(digits)
    return int(number) if number.is_integer() else number


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


# How tool calls stand in tags: what each begins with; its name, and what it holds; an argument's name, and its value.
# As Qwen3-Coder, Qwen3.5, Nemotron 3 and Seed-OSS write them; as MiniMax-M2; as GLM-4.5.
_TAGS = [
    [re.compile(pattern, re.DOTALL) for pattern in patterns]
    for patterns in (
        ("<function=", "<function=([^>]+)>(.*?)</function>", "<parameter=([^>]+)>(.*?)</parameter>"),
        ("<invoke name=", '<invoke name="([^"]+)">(.*?)</invoke>', '<parameter name="([^"]+)">(.*?)</parameter>'),
        (
            r"<tool_call>\s*[^\s<{[]",
            r"<tool_call>\s*([^\s<{[]+)(.*?)</tool_call>",
            r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
        ),
    )
]
_BEGINS, _OBJECT = re.compile(r"[{\[]"), re.compile(r'{\s*"')
_JSON = json.JSONDecoder(parse_float=_number, parse_constant=_refuse)
_KNOWN: dict[str, Score] = dict(zip(SCORES, (text, tool_call, fields), strict=True))


def score_of(settings: Settings) -> Score:
    """Return the recipe's answer_score; without one, text. Raises UserError for a function of the user's that gives no number."""
    named = settings.recipe.training.answer_score or "text"
    if named in _KNOWN:
        return _KNOWN[named]
    own = own_function(settings, "answer_score")

    def score(answer: str, reference: str) -> float:
        try:
            given = float(own(answer, reference))
        except Exception as error:
            why = f"it fails for the answer {answer[:60]!r}: {type(error).__name__}: {first_line(error)}"
        else:
            if math.isfinite(given):
                return given
            why = f"it gives {given} for the answer {answer[:60]!r}"
        raise UserError(settings.place("answer_score"), f"{named}: {why}", "return a finite number for any two texts")

    return score


def check(settings: Settings) -> None:
    """Raise UserError where there is no answer to score, or the user's function cannot score one."""
    if settings.recipe.training.answer_score:
        if not settings.recipe.training.eval_answers:
            problem = "answer_score scores no answer: eval_answers is 0"
            raise UserError(settings.place("answer_score"), problem, "set eval_answers to how many are scored (200)")
        score_of(settings)("an answer", "an answer")


def check_references(settings: Settings, references: Sequence[str]) -> None:
    """Raise UserError where the references are not what the recipe's answer_score compares: each score would be 0, or 1."""
    named, place = settings.recipe.training.answer_score, settings.place("answer_score")
    cure = "choose text, or a function of your own that reads them (docs/training.md)"
    if named not in _KNOWN:
        return
    for reference in references:
        if not _KNOWN[named](reference, reference):
            raise UserError(place, f"{named} cannot read the held-out answer {reference[:80]!r}", cure)
    if named == "tool_call" and not any(map(calls, references)):
        forms = "in JSON, or in the tags of Qwen3-Coder, MiniMax-M2 or GLM-4.5"
        raise UserError(place, f"none of {len(references)} held-out answers has a tool call {forms}", cure)


def texts(tokenizer: PreTrainedTokenizerBase, given: list[list[int]]) -> list[str]:
    """Return answers in token ids as texts without control tokens, and without blanks around them."""
    return [said.strip() for said in tokenizer.batch_decode(given, skip_special_tokens=True)]


def mean(
    score: Score, tokenizer: PreTrainedTokenizerBase, references: list[list[int]], given: list[list[int]]
) -> float:
    """Return the mean score of answers in token ids."""
    pairs = zip(texts(tokenizer, given), texts(tokenizer, references), strict=True)
    return math.fsum(score(*pair) for pair in pairs) / len(references)
