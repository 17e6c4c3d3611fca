"""Which words of a chat arrive in its text: a chat template may leave out contents, thoughts, calls and definitions of tools.

What a template leaves out of a kind of turn is found with marks: of each shape of a chat, one whose words are marks is rendered
once. What it leaves out of one chat alone is found in the text of each row.
"""

import html
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from ...errors import shown
from .keys import blank, says_nothing
from .messages import THOUGHTS
from .order import NO_ANSWER
from .pieces import (
    ARGUMENT,
    CALL,
    DEFINITION,
    TEXT,
    THOUGHT,
    TOOL,
    Piece,
    Place,
    answer_with_a_mark,
    pieces_of,
    planted,
)
from .rows import BadRow, Chat, Message
from .thinking import starts_with_a_mark
from .turn_by_turn import OPENED

LONG = 24  # characters of a piece of which no other words of a chat consist by chance
LONGEST_MARK = 64  # characters of a mark that opens thoughts, and of the white space behind it
MOST_SHAPES = 10_000  # of chats that are remembered
DROP, REMOVE = "drop the row", "remove them from the data"
LEFT_OUT = "which the chat template leaves out"
# Words by which templates are switched, and which some of them (SmolLM3, Qwen 3) take out of the text.
_SWITCHES = re.compile(r"/(?:no_?think|think|system_override)\b")
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})|\\.", re.DOTALL)
_NO_WORDS = re.compile(r"[\s\"'`\\]+")


class LeavesOut(BadRow):
    """A chat that another chat template may render whole; its cure is the other way."""

    def naming(self, templates: Sequence[str] | None) -> BadRow:
        """Return the error with both ways. templates: those of ours that fit the tokenizer and render the chat; None: none was
        tried"""
        problem, other = self.args
        names = ", ".join(templates or ()) or "none of Brigade's fits this tokenizer and does"
        tried = f" ({names})" if templates is not None else ""
        return BadRow(problem, f"name a chat_template that renders them{tried}, or {other}")


class Words:
    """Looks for the words of chats in their texts.

    render: chat -> text; what it raises says that the template refuses such a chat
    """

    def __init__(self, render: Callable[[Chat], str]) -> None:
        self._render = render
        self._left_out: dict[Any, frozenset[Place]] = {}  # of each shape of a chat

    def account(self, chat: Chat, text: str, learned: Sequence[bool], keeps_thoughts: bool = False) -> tuple[str, ...]:
        """Return in words what the template leaves out of a chat and may: thoughts, texts beside calls, what no learned answer
        needs. Raises LeavesOut where it leaves out an answer that is learned or what the answer is given to, and BadRow for an
        empty one.

        learned: of each turn of the assistant's; keeps_thoughts: whether all thoughts have to arrive
        """
        messages = chat.messages
        pieces = pieces_of(messages, chat.tools)
        flags = iter(learned)
        is_learned = [turn["role"] == "assistant" and next(flags) for turn in messages]
        missing = self.missing(chat, text, pieces)
        # vLLM writes the same thoughts under two keys, of which a template reads one.
        thought = {(piece.number, piece.words) for piece in pieces if piece.kind == THOUGHT and piece not in missing}
        missing = [piece for piece in missing if piece.kind != THOUGHT or (piece.number, piece.words) not in thought]
        counted = set(_empty_turns(messages, is_learned, pieces, missing))
        for number in itertools.compress(itertools.count(), is_learned):
            answer, mark = answer_with_a_mark(messages[number])
            if mark and not _stands_in(answer, text):
                problem = f"message {number + 1} mentions {mark}, and the chat template takes its text apart there"
                raise BadRow(problem, _cure_of(messages[number]))
            opened = _opened(answer, text)
            if opened and not starts_with_a_mark(answer) and self._writes(opened[0].strip(), chat, text, number):
                problem = (
                    f"message {number + 1} has marks of thoughts, and its answer begins within thoughts that are open"
                )
                raise BadRow(f"{problem}: {shown(answer)}", _cure_of(messages[number]))
        counted.update(_named(piece, messages, is_learned, keeps_thoughts) for piece in missing)
        return tuple(sorted(counted))

    def _writes(self, mark: str, chat: Chat, text: str, number: int) -> bool:
        """Whether the template writes a mark of thoughts itself, in a chat's text or in the prompt for a message; another's mark
        is as any other text."""
        if text.count(mark) > sum(message["content"].count(mark) for message in chat.messages):
            return True
        prompt = ""
        with suppress(Exception):  # it refuses such a chat
            prompt = self._render(chat._replace(messages=chat.messages[:number]).asking())
        return prompt.rstrip().endswith(mark)

    def missing(self, chat: Chat, text: str, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces that do not arrive in a chat's text."""
        left_out = self._of_shape(chat, pieces)
        bare: list[str] = []  # the text's letters, once they are asked for

        def arrives(piece: Piece) -> bool:
            if _stands_in(piece.words, text):
                return True
            if not bare:
                bare.append(_bare(text))
            return _bare(piece.words) in bare[0]

        def is_all_there(piece: Piece) -> bool:
            """The row may be taken otherwise than a chat of marks."""
            wanted = sum(other.words.count(piece.words) for other in pieces)
            return len(piece.words) >= LONG and text.count(piece.words) >= wanted

        return [
            piece for piece in pieces if not arrives(piece) or (piece.place in left_out and not is_all_there(piece))
        ]

    def _of_shape(self, chat: Chat, pieces: list[Piece]) -> frozenset[Place]:
        """Return the places whose words the template leaves out of chats of this shape, which is rendered once."""
        places = tuple(dict.fromkeys(piece.place for piece in pieces if piece.place))
        shape = tuple(turn["role"] for turn in chat.messages), places, repr(chat.variables)
        if shape not in self._left_out:
            if len(self._left_out) >= MOST_SHAPES:
                self._left_out.clear()
            marks = {place: f"7{number:06}7" for number, place in enumerate(places)}  # a number, too
            text = None
            with suppress(Exception):  # it refuses such a chat, and nothing is known
                text = self._render(planted(chat, marks))
            gone = [place for place, mark in marks.items() if text is not None and mark not in text]
            self._left_out[shape] = frozenset(gone)
        return self._left_out[shape]


# ---- looking ---------------------------------------------------------------------------------------------------------
def _opened(answer: str, text: str) -> re.Match[str] | None:
    """The mark of open thoughts in front of an answer. None also where the answer's text stands elsewhere without one: a short
    answer may begin later thoughts."""
    mark = None
    for place in re.finditer(re.escape(answer), text) if answer else ():
        mark = OPENED.search(text, max(place.start() - LONGEST_MARK, 0), place.start())
        if mark is None:
            break
    return mark


def _stands_in(words: str, text: str) -> bool:
    """Whether words stand in a text as they are, or as JSON or Python quote them."""
    if words in text:
        return True
    quoted = json.dumps(words, ensure_ascii=False), json.dumps(words), repr(words)
    return any(form[1:-1] in text for form in quoted)


def _cure_of(message: Message) -> str:
    if any(not says_nothing(message.get(key)) for key in THOUGHTS):
        return "write its thoughts as <think>...</think> before the answer, or drop the row"
    return "write thoughts as reasoning_content, or as <think>...</think> before the answer; or drop the row"


def _bare(text: str) -> str:
    """Return a text without what templates change within words: white space, quotes and their escapes, and switches."""
    unescaped = _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else "", text)
    return _NO_WORDS.sub("", _SWITCHES.sub("", html.unescape(unescaped)))


# ---- what becomes of it ----------------------------------------------------------------------------------------------
def _empty_turns(
    messages: list[Message], is_learned: list[bool], pieces: list[Piece], missing: list[Piece]
) -> Iterator[str]:
    """Yield in words that there are empty questions, or empty answers that are not learned. Raises BadRow for one that is: a
    turn without a text, a call, or thoughts that the template shows."""
    written = [piece for piece in pieces if not blank(piece.words)]
    answered = {piece.number for piece in written if piece.kind in (TEXT, CALL)}
    thought = {piece.number for piece in written if piece.kind == THOUGHT}
    shown_thoughts = {piece.number for piece in written if piece.kind == THOUGHT and piece not in missing}
    for number, message in enumerate(messages):
        if message["role"] == "user" and blank(message["content"]):
            yield "empty questions"
        if message["role"] != "assistant" or number in answered or number in shown_thoughts:
            continue
        if not is_learned[number]:
            yield "empty answers, which are not learned"
            continue
        problem, cure = f"the answer in message {number + 1} is empty, so it would teach to say nothing", NO_ANSWER
        if not says_nothing(message.get("refusal")):
            problem, cure = f"{problem}; its 'refusal' is not read", "write the refusal as its content, or drop the row"
        elif number in thought:
            problem, cure = f"{problem}; the chat template leaves out its thoughts", NO_ANSWER
        raise BadRow(problem, cure)


def _named(piece: Piece, messages: list[Message], is_learned: list[bool], keeps_thoughts: bool) -> str:
    """Return what the template leaves out, as the run counts it. Raises LeavesOut where a row cannot do without it."""
    if piece.kind == TOOL:
        raise LeavesOut("it has tools, and the chat template leaves them out", REMOVE)
    if piece.kind == DEFINITION:
        return f"parts of definitions of tools, {LEFT_OUT}"
    number = piece.number
    message, called = messages[number], f"message {number + 1}"
    excerpt = shown(piece.words)
    if piece.kind == THOUGHT:
        if keeps_thoughts:
            problem = f"thinking is keep, and the chat template leaves out the thoughts of {called}"
            raise BadRow(problem, "leave thinking out, drop the row, or name another chat_template")
        later = any(turn["role"] == "user" for turn in messages[number:])
        return f"thoughts {'of earlier turns' if later else 'after the last question'}, {LEFT_OUT}"
    if piece.kind in (CALL, ARGUMENT):
        if not is_learned[number]:
            return f"tool calls of earlier turns, {LEFT_OUT}"
        if piece.kind == CALL:
            raise LeavesOut("it has tool_calls, and the chat template leaves them out", REMOVE)
        raise LeavesOut(f"the chat template leaves out {excerpt}, an argument of a tool call in {called}", DROP)
    if message["role"] == "assistant":
        if message.get("tool_calls"):
            return f"texts beside tool calls, {LEFT_OUT}"
        if not is_learned[number]:
            return f"earlier answers, {LEFT_OUT}"
    else:
        behind = zip(messages[number:], is_learned[number:], strict=True)
        answers = (learned for turn, learned in behind if turn["role"] == "assistant")
        if message["role"] in ("user", "tool") and not next(answers, True):
            return f"earlier turns, {LEFT_OUT}"
    raise LeavesOut(f"the chat template leaves out {excerpt} of {called}, which is the {message['role']}'s", DROP)
