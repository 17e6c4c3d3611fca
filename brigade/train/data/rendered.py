"""Texts that have been through a chat template already, by the marks at their ends: this tokenizer's template, or another's."""

import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

from ..recipe.files import read_yaml
from .keys import blank
from .rows import BadRow, Message

_TABLE = read_yaml(Path(__file__).with_name("rendered.yaml"))
FIRSTS, ENDS, RESULTS = (tuple(_TABLE[key]) for key in ("firsts", "ends", "results"))
_THOUGHTS = re.compile(r"(?:\s*</?think>)+\s*\Z")  # which a prompt begins, or leaves empty, behind its last mark
_STRIKES = {"<s>": re.compile(r"</s>"), "</s>": re.compile(r"<s[ >]")}  # tags of HTML where both stand in a text
CURE = "give texts without a template's marks; chat_template: none joins prompts and completions that are texts as they are"


class _Template(NamedTuple):
    """Marks of one family of chat templates, as in rendered.yaml."""

    of: str
    asks: tuple[str, ...]
    answers: tuple[str, ...]
    words: bool = False
    anywhere: bool = False

    def opens(self, text: str) -> str | None:
        """Return the mark of a question with which a text begins, or which stands in it where the family's may."""
        first = _beginning(text, self.asks)
        if first is None and self.anywhere:
            return next((mark for mark in self.asks if re.search(rf"(?<!\S){re.escape(mark)}", text)), None)
        return first

    def answered(self, text: str) -> bool:
        """Whether a text has the mark of an answer where it may stand; words at the beginning of a line, or behind a blank."""
        marks = (mark for mark in self.answers if mark in text)
        return any(
            not self.words or re.search(_place_of(mark, self.anywhere) + re.escape(mark), text) for mark in marks
        )


_TEMPLATES = tuple(
    _Template(**entry | {key: tuple(entry[key]) for key in ("asks", "answers")}) for entry in _TABLE["templates"]
)
_BEGINNINGS = FIRSTS + tuple(mark for template in _TEMPLATES for mark in template.asks + template.answers)
_ENDINGS = ENDS + tuple(mark for template in _TEMPLATES for mark in template.answers)


class Sign(NamedTuple):
    """A mark of a chat template at an end of a text.

    sure: whether only a template writes a text like that; else it may speak of templates, or imitate a dialogue
    """

    mark: str
    where: str  # begins, ends
    of: str
    sure: bool

    def error(self, called: str) -> BadRow:
        """Return the error of a text that has it. called: the text"""
        whose = f", a mark of {self.of}'s chat template" if self.of else ""
        problem = f"{called} {self.where} with {self.mark.strip()!r}{whose}, so it seems to have been through a template already"
        return BadRow(problem, CURE)

    def counted(self, called: str) -> str:
        """Return how texts are counted that have it. called: such texts"""
        place = {"begins": "beginning", "ends": "end"}[self.where]
        return f"{self.mark.strip()} at the {place} of {called} (a chat template's mark), read as letters"


def look(
    messages: list[Message],
    control: re.Pattern[str],
    around: tuple[str, str],
    end: str = "",
    own: Container[str] = (),
) -> tuple[str, ...]:
    """Return which marks stand at the ends of a chat's contents, in words, besides special tokens, which are counted as such.
    Raises BadRow for a content that has been rendered.

    control: finds this tokenizer's special tokens; around: what the run's own template writes before a question and behind it
    end: what it writes behind an answer; own: tokens that the recipe adds, which are meant
    """
    counted, ends = set(), (*ENDS, end) if end else ENDS
    for message in messages:
        role = message["role"]
        if role == "tool":
            mark = mark_at_beginning(message["content"].lstrip(), RESULTS)
            if mark and mark not in own:
                counted.add(Sign(mark, "begins", "", False).counted("tool results"))
            continue
        sign = answer(message["content"], ends) if role == "assistant" else question(message["content"], around)
        if sign is None or sign.mark in own:
            continue
        # A special token of this tokenizer that opens a turn, with the line's end that templates write behind it.
        own_begin = control.match(sign.mark) and message["content"].lstrip().startswith(f"{sign.mark}\n")
        if sign.sure or own_begin:
            raise sign.error(f"the {role} turn")
        if not control.search(sign.mark):
            counted.add(sign.counted("answers" if role == "assistant" else "questions"))
    return tuple(sorted(counted))


def question(text: str, around: tuple[str, str] = ("", "")) -> Sign | None:
    """Return the sign that a prompt, or a turn of a user's or the system's, has been rendered. around: as of look()"""
    begin, end = _bare(text)
    if min(map(len, around)) > 1 and begin.startswith(around[0]) and end.endswith(around[1]):  # a letter is no mark
        return Sign(around[1], "ends", "this run", True)
    end = _THOUGHTS.sub("", end)
    if not (begin.startswith(_BEGINNINGS) or end.endswith(_ENDINGS)):
        return None
    first, closed = mark_at_beginning(begin, FIRSTS), mark_at_end(end, ENDS)
    likely = None
    for template in _TEMPLATES:
        opened, asked = template.opens(begin), mark_at_end(end, template.answers)
        if asked and (opened or first or (not template.words and _directly(end, asked))):
            return Sign(asked, "ends", template.of, True)
        if opened and (not template.words or (template.anywhere and template.answered(begin))):
            likely = likely or Sign(opened, "begins", template.of, not template.words and closed is not None)
    return likely or _at_an_end(begin, closed)


def _at_an_end(begin: str, closed: str | None) -> Sign | None:
    """Return the sign of a text without the mark of a turn: the first token of a chat, or the mark that ends the text."""
    first = mark_at_beginning(begin, FIRSTS)
    if first and not begin.startswith(first + " "):
        return Sign(first, "begins", "", closed is not None)
    return Sign(closed, "ends", "", False) if closed else None


def answer(text: str, ends: tuple[str, ...] = ENDS) -> Sign | None:
    """Return the sign that an answer has been rendered: with its end, with the mark before it, or behind its whole prompt."""
    begin, end = _bare(text)
    if not (begin.startswith(_BEGINNINGS) or end.endswith(ends)):
        return None
    closed = mark_at_end(end, ends)
    if closed and _directly(end, closed):
        return Sign(closed, "ends", "", True)
    whole = transcript(text)
    if whole:
        return whole._replace(sure=whole.sure or closed is not None)
    for template in _TEMPLATES:
        mark = _beginning(begin, template.answers)
        if mark:
            behind = begin[begin.index(mark) + len(mark) :]
            return Sign(mark, "begins", template.of, not template.words and not behind.startswith(" "))
    return _at_an_end(begin, closed)


def transcript(text: str) -> Sign | None:
    """Return the sign that a text is a whole rendered chat: the mark of a question at its beginning, an answer's behind it."""
    begin, _ = _bare(text)
    if not begin.startswith(_BEGINNINGS):
        return None
    for template in _TEMPLATES:
        opened = _beginning(begin, template.asks)
        if opened and template.answered(begin):
            return Sign(opened, "begins", template.of, not template.words)
    return None


def learned_whole(text: str, own: Iterable[str]) -> Sign | None:
    """Return the sign that a text without a chat template around it has been rendered by another tokenizer's. own: this
    tokenizer's added tokens, which are meant where a text has them"""
    sign = transcript(text) or question(text)
    return None if sign is None or any(token in sign.mark for token in own) else sign


def repeats(prompt: str, answers: Iterable[str]) -> bool:
    """Whether all answers begin with the prompt's text, and the prompt is not a greeting that an answer may well return."""
    asked = _behind_first(prompt).strip()
    if len(asked.split()) < 5 and not asked.endswith(("?", ":")):
        return False
    texts = map(_behind_first, answers)
    return all(text.startswith(asked) and not text[len(asked) :][:1].isalnum() for text in texts)


def says_nothing(text: str, own: Iterable[str]) -> bool:
    """Whether a text is nothing but tokens that begin or end texts. own: those of this tokenizer, besides the usual ones"""
    for mark in sorted({*FIRSTS, *ENDS, *own}, key=len, reverse=True):  # one may begin another
        text = text.replace(mark, "")
    return blank(text)


def _behind_first(text: str) -> str:
    """Return a text without a chat's first token, and without white space before it and behind it."""
    text = text.lstrip()
    return text.removeprefix(mark_at_beginning(text, FIRSTS) or "").lstrip()


def _bare(text: str) -> tuple[str, str]:
    """Return a text without white space before it, and without any behind it."""
    return text.lstrip(), text.rstrip()


def _beginning(begin: str, marks: tuple[str, ...]) -> str | None:
    """Return which of the marks a text begins with, behind the first tokens of a chat."""
    for first in FIRSTS:
        if begin.startswith(first) and not begin.startswith(marks):
            begin = begin[len(first) :].lstrip()
    return mark_at_beginning(begin, marks)


def mark_at_beginning(text: str, marks: tuple[str, ...]) -> str | None:
    """Return the longest of the marks with which a text begins, unless it is one of a pair of tags."""
    found = [mark for mark in marks if text.startswith(mark)]
    return max(found, key=len) if found and _no_tag(text, found[0]) else None


def mark_at_end(text: str, marks: tuple[str, ...]) -> str | None:
    """Return the longest of the marks with which a text ends, unless it is one of a pair of tags."""
    found = [mark for mark in marks if text.endswith(mark)]
    return max(found, key=len) if found and _no_tag(text, found[0]) else None


def _no_tag(text: str, mark: str) -> bool:
    return mark not in _STRIKES or not _STRIKES[mark].search(text)


def _place_of(mark: str, anywhere: bool) -> str:
    """Return a pattern of where a mark of words may stand: at the beginning of a line, or behind a blank."""
    if mark.startswith("#"):
        return "(?<!#)"
    return r"(?<!\S)" if anywhere or not mark[0].isalpha() else r"(?m:^)[ \t]*"


def _directly(end: str, mark: str) -> bool:
    """Whether a mark stands directly behind a text, a line or another turn's end; behind a blank, a sentence may speak of it."""
    before = end.removesuffix(mark)
    return not before.endswith(" ") or before.rstrip().endswith(ENDS)
