"""From a row to text of which a part is supervised: chats through their template, pairs of prompt and completion, texts."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import shown
from .rows import BadRow

# ShareGPT's names beside OpenAI's.
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")} | {
    "human": "user",
    "gpt": "assistant",
}
# What other sets call the columns, for the cure of a row that has none of ours.
USUAL = {
    "messages": ("conversations", "conversation", "dialogue", "chat"),
    "prompt": ("instruction", "question", "query"),
    "completion": ("output", "response", "answer", "answers"),
    "text": ("content", "body", "article"),
}
UNTRAINED = ("weight", "train", "training")  # of a message, 0 or false: no loss on it, as OpenAI and axolotl write it
MAY_FOLLOW = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
NO_ANSWER = "add the answer, or drop the row"

Message = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """What is to be tokenised. spans: supervised parts as (begin, end) in characters; rendered: by a chat template,
    which writes special tokens itself; splits: a long one is cut into several samples; plain: parts in which no special
    token is meant; counts: of encode.ABOUT"""

    text: str
    spans: list[tuple[int, int]]
    rendered: bool = False
    splits: bool = False
    plain: tuple[tuple[int, int], ...] = ()
    counts: tuple[int, ...] = (0, 0, 0)


def kind_of(row: Any, columns: dict[str, str]) -> str:
    """messages, prompt or text: what a row holds. Raises BadRow, listing what it has instead."""
    if not isinstance(row, dict):
        raise BadRow(f"not an object of columns: {repr(row)[:60]}", 'write {"messages": [...]}')
    for kind in ("messages", "prompt", "text"):
        if row.get(columns.get(kind, kind)) is not None:
            return kind
    wanted = [columns.get(kind, kind) for kind in ("messages", "prompt", "text")]
    if null := [name for name in wanted if name in row]:
        raise BadRow(f"{' and '.join(map(repr, null))} is null", "give the row a value, or drop it")
    there = ", ".join(map(repr, row)) or "nothing"
    usual = {key: next((name for name in names if name in row), None) for key, names in USUAL.items()}
    offer = ", ".join(f"{key}: {name}" for key, name in usual.items() if name) or "messages: conversations"
    cure = f"name yours in data.columns, e.g. columns: {{{offer}}}"
    if {"instruction", "input"} <= row.keys():
        cure += "; `input` is then left out: join it to the instruction first"
    raise BadRow(f"none of the columns {', '.join(map(repr, wanted))} here, only {there}", cure)


def convert(row: Any, columns: dict[str, str], render: Callable[..., Text]) -> Text | None:
    """A row as text with its supervised part, or None for a `text` without a character but white space: crawled sets have
    such, and nothing is to be learnt from them.

    render: (messages, tools) -> rendered text, all the assistant's spans in it. Raises BadRow.
    """
    kind = kind_of(row, columns)
    value = row[columns.get(kind, kind)]
    tools = row.get(columns.get("tools", "tools"))
    if kind == "text":
        if not isinstance(value, str):
            raise BadRow(f"the text is {shown(value)}, not a string", "give each row a text")
        return Text(value, [(0, len(value))], splits=True) if value.strip() else None
    if kind == "prompt":
        name = columns.get("completion", "completion")
        completion = row.get(name)
        if completion is None:
            problem = f"a prompt without a column {name!r}, only {', '.join(map(repr, row))}"
            raise BadRow(problem, "name yours in data.columns: {completion: answer}")
        if isinstance(value, str) and isinstance(completion, str):
            if not completion:
                raise BadRow("the completion is empty, so nothing is supervised", "give each row a completion")
            return Text(value + completion, [(len(value), len(value) + len(completion))])
        if not isinstance(value, list) or not isinstance(completion, list):
            problem = f"prompt is {shown(value)}, completion {shown(completion)}"
            raise BadRow(problem, "give two texts, or two lists of messages")
        if not any(_message(message)["role"] == "assistant" for message in completion):
            raise BadRow("the completion has no assistant turn, so nothing is supervised", NO_ANSWER)
        whole, begin = chat(value + completion), len(value)
    else:
        whole, begin = chat(value), 0
    text = render(whole, _tools(tools))
    turns = [(number, turn) for number, turn in enumerate(whole) if turn["role"] == "assistant"]
    answers = [number >= begin and turn.get("train", True) for number, turn in turns]
    if all(answers):
        return text
    if len(text.spans) != len(answers):
        problem = f"the chat template marks {len(text.spans)} parts of {len(answers)} assistant turns"
        raise BadRow(f"{problem}, and not all are to be supervised", "use a template that marks each turn once")
    return replace(text, spans=[span for span, wanted in zip(text.spans, answers, strict=True) if wanted])


def chat(messages: Any) -> list[Message]:
    """Checked messages in one form: roles and contents, tool calls with arguments as objects, nothing that is None.

    Raises BadRow for unknown roles, contents that are no text, turns that do not alternate, and no assistant's turn.
    """
    if not isinstance(messages, list) or not messages:
        problem = f"messages is {shown(messages)}, not a list of turns"
        raise BadRow(problem, 'write [{"role": ..., "content": ...}, ...]')
    whole = [_message(message) for message in messages]
    before = ""
    for number, message in enumerate(whole, 1):
        role = message["role"]
        if role in ("system", "developer"):
            if number > 1:
                raise BadRow(f"message {number} is a {role} turn", "a system turn can only be the first")
            continue
        if role not in MAY_FOLLOW.get(before, ("user", "assistant")):
            then, start = " or ".join(MAY_FOLLOW.get(before, ("user",))), before or "the start"
            problem = f"roles do not alternate: message {number} is {role!r} after {start!r}"
            raise BadRow(problem, f"after {start} comes {then}: join or drop turns")
        before = role
    if not any(message["role"] == "assistant" for message in whole):
        raise BadRow("a dialogue without an assistant turn, so nothing is supervised", NO_ANSWER)
    return whole


def _message(message: Any) -> Message:
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    if role is None:
        raise BadRow(f"a message without a role: {repr(message)[:60]}", 'write {"role": ..., "content": ...}')
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"role {role!r} is none of {', '.join(ROLES)}", "fix the message's role")
    content = message.get("content", message.get("value"))
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text")) for part in content)
    calls = message.get("tool_calls")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        problem = f"the content of {role!r} is {'missing' if content is None else shown(content)}, not text"
        raise BadRow(problem, "give each message a text content")
    ours = ("role", "from", "content", "value", "tool_calls", *UNTRAINED)
    rest = {k: v for k, v in message.items() if k not in ours and v is not None}
    whole = {"role": ROLES[role], "content": content, **rest}
    for key in (key for key in UNTRAINED if message.get(key) is not None):
        named = f"{key} {message[key]!r}"
        if message[key] not in (0, 1):
            raise BadRow(f"{named} of a {role!r} turn is neither 0 nor 1", "a turn is trained on, or it is not")
        if message[key] and whole["role"] != "assistant":
            raise BadRow(f"{named} asks for loss on a {role!r} turn", "loss is on the assistant's turns: remove it")
        if not message[key] and whole["role"] == "assistant":
            whole["train"] = False
    return whole | {"tool_calls": [_call(call) for call in calls]} if calls else whole


def _call(call: Any) -> dict[str, Any]:
    """A tool call whose arguments are an object, as chat templates expect; OpenAI's are JSON in a text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        problem = f"a tool call without a function's name: {repr(call)[:60]}"
        raise BadRow(problem, 'write {"function": {"name": ..., "arguments": {...}}}')
    arguments = _from_json(function.get("arguments", {}), f"arguments of {function['name']!r}")
    return {"type": "function", **call, "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any) -> list[Any] | None:
    """Definitions of tools: a list of objects, or JSON of one (Arrow cannot hold tools of different parameters)."""
    tools = _from_json(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"tools is {shown(tools)}, not a list of definitions", "give a list of JSON schemas")
    return tools


def _from_json(value: Any, what: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise BadRow(f"{what} are not JSON: {error.msg}", "fix them") from None
