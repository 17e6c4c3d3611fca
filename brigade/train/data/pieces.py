"""The words of a chat that have to arrive in its text, each with the place where it stands in all chats of the same shape."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...errors import shown
from ...errors.tables import Fields
from .images import MARK
from .keys import says_nothing
from .messages import THOUGHTS
from .rows import BadRow, Chat, Message, Tools
from .thinking import MARK as THINK
from .thinking import ends_thoughts

Place = tuple[Any, ...]  # where a piece stands in all chats of one shape
TEXT, THOUGHT, CALL, ARGUMENT, TOOL, DEFINITION = "text", "thought", "call", "argument", "tool", "definition"

_THINK = re.compile(THINK)
_NO_TAG = re.compile(f"{THINK}|{MARK}")
# What templates look at within a text: marks of thoughts, and tags at its beginning and end (<tool_response>).
_LOOKED_AT = re.compile(rf"({THINK}|{MARK}|\A\s*<[^<>\s]{{1,40}}>|</[^<>\s]{{1,40}}>\s*\Z)")


class Piece(NamedTuple):
    """Words that have to arrive.

    number: of the message, from 0; -1: of the row's tools; place: None where no mark stands for it
    """

    kind: str
    number: int
    words: str
    place: Place | None


def pieces_of(messages: list[Message], tools: Tools | None) -> list[Piece]:
    """Return all words of a chat. Raises BadRow for thoughts that are no text."""
    return [*_of_messages(messages), *_of_tools(tools)]


def planted(chat: Chat, marks: dict[Place, str]) -> Chat:
    """Return a chat of the same shape whose words are marks, which are numbers."""
    messages = [_planted_message(number, turn, marks) for number, turn in enumerate(chat.messages)]
    return chat._replace(messages=messages, tools=_planted_tools(chat.tools, marks))


# ---- what is looked for ----------------------------------------------------------------------------------------------
def _of_messages(messages: list[Message]) -> Iterator[Piece]:
    for number, message in enumerate(messages):
        segments = _segments(message["content"])
        thoughts = _thoughts(segments)[0] if message["role"] == "assistant" and len(segments) > 1 else set()
        marks = tuple(segments[1::2])
        for at in range(0, len(segments), 2):
            words = segments[at].strip()
            if words:
                yield Piece(THOUGHT if at in thoughts else TEXT, number, words, (number, "content", marks, at))
        only_tags = len(segments) > 1 and not "".join(segments[::2]).strip()
        if only_tags and not _NO_TAG.search(message["content"]):
            yield Piece(TEXT, number, message["content"].strip(), None)
        for key in THOUGHTS:
            thought = message.get(key)
            if says_nothing(thought):
                continue
            if not isinstance(thought, str):
                problem = f"the {key} of message {number + 1} is {shown(thought)}, not text"
                raise BadRow(problem, "write the thoughts of a turn as one text")
            words = thought.strip()
            if words:
                yield Piece(THOUGHT, number, words, (number, key))
        for at, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            yield Piece(CALL, number, function["name"], (number, "call", at, "name"))
            for kind, words in _leaves(function["arguments"]):
                place = (number, "call", at, kind) if kind != "key" else None
                yield Piece(ARGUMENT, number, words, place)


def _segments(text: str) -> list[str]:
    """Return a text cut at what templates look at, which has the odd places."""
    if "<" not in text and "[" not in text and MARK not in text:
        return [text]
    return _LOOKED_AT.split(text)


def _thoughts(segments: list[str]) -> tuple[set[int], str]:
    """Return which segments of an answer are thoughts, and the first mark of thoughts that the answer mentions: one that is
    neither the beginning nor the end of some; "" where there is none.

    Thoughts stand within <think>...</think>, or before a </think> that ends its line, for a prompt may have begun them.
    """
    found, opened, strays = set[int](), 0, list[int]()
    for at in range(1, len(segments), 2):
        mark = segments[at].strip()
        if not _THINK.fullmatch(mark):
            continue
        if not ends_thoughts(mark):
            strays += [opened] if opened else []
            opened = at
        elif opened:
            found.update(range(opened + 1, at, 2))
            opened = 0
        elif not found and not strays and _ends_its_line(segments, at):
            found.update(range(0, at, 2))
        else:
            strays.append(at)
    strays += [opened] if opened else []
    return found, segments[min(strays)].strip() if strays else ""


def _ends_its_line(segments: list[str], at: int) -> bool:
    return segments[at + 1].startswith("\n") or (not segments[at + 1] and segments[at - 1].endswith("\n"))


def answer_with_a_mark(message: Message) -> tuple[str, str]:
    """Return an answer without the thoughts before it, and the mark of thoughts that it mentions; "" where it mentions none."""
    segments = _segments(message["content"])
    if len(segments) == 1:
        return "", ""
    thoughts, mark = _thoughts(segments)
    first = next((at for at in range(0, len(segments), 2) if segments[at].strip() and at not in thoughts), 0)
    return "".join(segments[first:]).strip(), mark


def _leaves(value: object, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield kind and words of all names and values of a call's arguments."""
    inner = "nested " if depth > 1 else ""
    if isinstance(value, dict):
        for key, below in value.items():
            yield "key", str(key)
            yield from _leaves(below, depth + 1)
    elif isinstance(value, list):
        for below in value:
            yield from _leaves(below, depth + 1)
    elif isinstance(value, str):
        if value.strip():
            yield f"{inner}text", value.strip()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield f"{inner}number", json.dumps(value)


def _of_tools(tools: Tools | None) -> Iterator[Piece]:
    for tool in tools or ():
        function, wrapped = tool.get("function", tool), "function" in tool
        for key in "name", "description":
            words = function.get(key)
            if isinstance(words, str) and words.strip():
                yield Piece(TOOL if key == "name" else DEFINITION, -1, words.strip(), (-1, wrapped, key))
        for key, words in _of_schema(_with_properties(function.get("parameters"))):
            yield Piece(DEFINITION, -1, words, (-1, wrapped, key))


def _with_properties(parameters: object) -> object:
    """Return a tool's parameters as a schema, where they are types by the arguments' names, or a list of objects with names: some
    templates write neither."""
    if isinstance(parameters, list):
        named = {str(each["name"]): each for each in parameters if isinstance(each, dict) and "name" in each}
    elif isinstance(parameters, dict) and not (parameters.get("properties") or isinstance(parameters.get("type"), str)):
        named = {key: each for key, each in parameters.items() if isinstance(each, dict) and not key.startswith("$")}
    else:
        return parameters
    return {"properties": named}


def _of_schema(schema: object) -> Iterator[tuple[str, str]]:
    """Yield the names and descriptions of a JSON schema's properties, each with what it is."""
    if isinstance(schema, list):
        for below in schema:
            yield from _of_schema(below)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key == "properties" and isinstance(value, dict):
            yield from (("property", name) for name in value)
            yield from _of_schema([*value.values()])
        elif key == "description" and isinstance(value, str) and value.strip():
            yield "of property", value.strip()
        elif key not in ("default", "enum", "const", "examples"):
            yield from _of_schema(value)


# ---- a chat of the same shape ----------------------------------------------------------------------------------------
def _planted_message(number: int, message: Message, marks: dict[Place, str]) -> Message:
    segments = _segments(message["content"])
    tags = tuple(segments[1::2])
    for at in range(0, len(segments), 2):
        mark = marks.get((number, "content", tags, at))
        if mark:
            segments[at] = segments[at].replace(segments[at].strip(), mark)
    turn = message | {"content": "".join(segments)}
    turn |= {key: marks[number, key] for key in THOUGHTS if (number, key) in marks}
    if message.get("tool_calls"):
        turn["tool_calls"] = [_planted_call(number, at, call, marks) for at, call in enumerate(message["tool_calls"])]
    return turn


def _planted_call(number: int, at: int, call: Fields, marks: dict[Place, str]) -> Fields:
    kinds = {place[3]: mark for place, mark in marks.items() if place[:3] == (number, "call", at)}
    arguments: Fields = {}
    for kind, mark in kinds.items():
        if kind == "name":
            continue
        value = int(mark) if kind.endswith("number") else mark
        name = kind.replace(" ", "_")
        arguments[name] = {"inner": value} if kind.startswith("nested") else value
    return call | {"function": call["function"] | {"name": kinds["name"], "arguments": arguments}}


def _planted_tools(tools: Tools | None, marks: dict[Place, str]) -> Tools | None:
    if not tools:
        return tools
    definitions = list[Any]()
    for wrapped in dict.fromkeys(place[1] for place in marks if place[0] == -1):
        kinds = {place[2]: mark for place, mark in marks.items() if place[:2] == (-1, wrapped)}
        described = {"type": "string", "description": kinds.get("of property", "")}
        schema = {"type": "object", "properties": {kinds.get("property", "x"): described}, "required": []}
        function = {"name": kinds.get("name", "f"), "description": kinds.get("description", ""), "parameters": schema}
        definitions.append({"type": "function", "function": function} if wrapped else function)
    return definitions or tools
