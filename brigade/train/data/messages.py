"""Chats in one form: roles, contents, tool calls whose arguments are objects, and which turns are learned."""

import json
from collections.abc import Iterable
from typing import Any

from ...errors import shown
from . import image_places, keys
from .row_images import TYPES, RowImages
from .rows import BadRow

# The names of roles: OpenAI's, ShareGPT's, and those of LLaMA-Factory and ms-swift for calls and their results.
CALLS = ("function_call", "tool_call")
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")} | {
    "human": "user",
    "gpt": "assistant",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    **dict.fromkeys(CALLS, "assistant"),
}
# Keys of a message or a part that, where 0 or false, mean no loss on it. OpenAI writes weight, axolotl train, ms-swift loss and
# loss_scale, LLaMA-Factory loss_weight.
UNTRAINED = ("weight", "train", "training", "loss", "loss_weight", "loss_scale")
READ = frozenset(("role", "from", "content", "value", "tool_calls", "function_call", *UNTRAINED))
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # Transformers gives templates each as the first two
MAY_FOLLOW = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
NO_ANSWER = "add the answer, or drop the row"

Message = dict[str, Any]


def check_order(messages: list[Message]) -> None:
    """Raise BadRow for turns that do not alternate, and for a chat without an assistant's turn."""
    before = ""
    for number, message in enumerate(messages, 1):
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
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("a dialogue without an assistant turn, so nothing is supervised", NO_ANSWER)


def turns(messages: Any, unread: set[str], called: str = "messages", images: RowImages | None = None) -> list[Message]:
    """Return messages in one form; a call that is a message of its own joins the assistant's turn before it.

    unread: a set to which the keys that nobody reads are added; called: the column, for what is wrong with it
    images: the row's, where images are read
    Raises BadRow for what is no list of turns, and for what a turn lacks.
    """
    messages = from_json(messages, called)
    if not isinstance(messages, list) or not messages:
        problem = f"{called} is {shown(messages)}, not a list of turns"
        raise BadRow(problem, 'write [{"role": ..., "content": ...}, ...]')
    whole: list[Message] = []
    for message in messages:
        turn = _message(message, unread, images)
        last = whole[-1] if whole else {}
        if _role(message) in CALLS and last.get("role") == "assistant" and last.get("train") == turn.get("train"):
            whole[-1] = last | {"tool_calls": [*last.get("tool_calls", []), *turn["tool_calls"]]}
        else:
            whole.append(turn)
    return whole


def _role(message: Any) -> Any:
    return message.get("role", message.get("from")) if isinstance(message, dict) else None


def _message(message: Any, unread: set[str], images: RowImages | None) -> Message:
    role = _role(message)
    if role is None:
        raise BadRow(f"a message without a role: {repr(message)[:60]}", 'write {"role": ..., "content": ...}')
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"role {role!r} is none of {', '.join(ROLES)}", "fix the message's role")
    keys.MESSAGES.refuse(message, f"in a {role!r} turn, the key")
    content, calls = message.get("content", message.get("value")), message.get("tool_calls")
    flags = _flags(message, role)
    if role in CALLS:
        content, calls = "", from_json(content, f"the content of {role!r}")
        calls = calls if isinstance(calls, list) and calls else [calls]
    if message.get("function_call") is not None:  # OpenAI's, before there were tools
        calls = [*(calls or []), message["function_call"]]
    if isinstance(content, list):
        content, flags_of_parts = _joined(content, role, unread, images)
        flags |= flags_of_parts
    elif isinstance(content, str) and images is not None:
        content = images.text(content, ROLES[role])
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        problem = f"the content of {role!r} is {'missing' if content is None else shown(content)}, not text"
        raise BadRow(problem, "give each message a text content")
    if "<" in content:
        marks = image_places.refuse_pictures(content, ROLES[role], images is not None)
        unread |= {f"{mark} in texts, read as letters" for mark in marks}
    rest = {key: value for key, value in message.items() if key not in READ and value is not None}
    whole = {"role": ROLES[role], "content": content, **rest}
    if ROLES[role] == "assistant":
        if len(set(flags.values())) > 1:
            problem = f"{_named(flags)} of one turn contradict each other"
            raise BadRow(problem, "whole turns are learned or not: split the turn, or give all the same")
        whole |= {} if all(flags.values()) else {"train": False}
    elif any(flags.values()):
        named = _named({key: value for key, value in flags.items() if value})
        raise BadRow(f"{named} asks for loss on a {role!r} turn", "loss is on the assistant's turns: remove it")
    return whole | {"tool_calls": [_call(call) for call in calls]} if calls else whole


def _flags(content: dict[str, Any], role: str, called: str = "a {} turn") -> dict[str, Any]:
    """Return the flags of a turn or a part, which say whether it is learned. Raises BadRow for weights besides 0 and 1."""
    flags = {key: content[key] for key in UNTRAINED if content.get(key) is not None}
    for key, value in flags.items():
        if not isinstance(value, (int, float)) or value not in (0, 1):
            problem = f"{key} {value!r} of {called.format(repr(role))} is neither 0 nor 1"
            raise BadRow(problem, "a turn is trained on, or it is not")
    return flags


def _named(flags: dict[str, Any]) -> str:
    return " and ".join(f"{key} {value!r}" for key, value in flags.items())


def _joined(parts: list[Any], role: str, unread: set[str], images: RowImages | None) -> tuple[str, dict[str, Any]]:
    """Return the text of a content that is a list of parts, and the flags of its parts, which have to be alike."""
    texts, flags = [], []
    for part in parts:
        if not isinstance(part, dict):
            raise BadRow(f"the content of {role!r} is {shown(parts)}, not text", "give each message a text content")
        kind, read = part.get("type"), {"type", *UNTRAINED}
        if images is not None and kind in TYPES:
            text, known = images.part(part, ROLES[role])
            read |= known
        elif kind != "text":
            keys.PARTS.refuse({str(kind): part}, f"in the content of {role!r}, a part of type")
            raise BadRow(f"a part of type {kind!r} in the content of {role!r}", "parts are {type: text, text: ...}")
        else:
            name = next((name for name in ("text", "value", "content") if part.get(name) is not None), "text")
            written = part.get(name)
            if not isinstance(written, str):
                problem = f"a part of the content of {role!r} is {shown(written)}, not text"
                raise BadRow(problem, "give each part a text")
            text = written if images is None else images.text(written, ROLES[role])
            read.add(name)
        texts.append(text)
        flags.append(_flags(part, role, "a part of a {} turn"))
        unread |= {f"key {key!r} of parts" for key in part.keys() - read if not keys.says_nothing(part[key])}
    if ROLES[role] == "assistant" and len({all(flag.values()) for flag in flags}) > 1:
        named = _named(next(flag for flag in flags if not all(flag.values())))
        problem = f"{named} of one part of a {role!r} turn, and not of all of its parts"
        raise BadRow(problem, "whole turns are learned or not: flag all parts of a turn alike, or remove the flags")
    merged: dict[str, Any] = {}
    for flag in flags:
        merged |= {
            f"{key} of parts": bool(value) or merged.get(f"{key} of parts", False) for key, value in flag.items()
        }
    return "".join(texts), merged


def _call(call: Any) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, as chat templates expect; OpenAI's are JSON in a text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        problem = f"a tool call without a function's name: {repr(call)[:60]}"
        raise BadRow(problem, 'write {"function": {"name": ..., "arguments": {...}}}')
    arguments = from_json(function.get("arguments", {}), f"arguments of {function['name']!r}")
    rest = call if "function" in call else {key: call[key] for key in call.keys() - {"name", "arguments"}}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments}}


def tool_definitions(tools: Any, functions: Any = None) -> list[Any] | None:
    """Return definitions of tools, or None. They may be a list of objects or JSON of one (Arrow cannot hold tools of different
    parameters), and so may the parameters.

    functions: OpenAI's older form, without the object around each
    """
    definitions = []
    for given, key in (tools, "tools"), (functions, "functions"):
        value = from_json(given or None, key)
        if not value:
            continue
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise BadRow(f"{key} is {shown(value)}, not a list of definitions", "give a list of JSON schemas")
        definitions += [_definition(tool, wrap=key == "functions") for tool in value]
    return definitions or None


def _definition(tool: dict[str, Any], wrap: bool) -> dict[str, Any]:
    inner = tool if wrap else tool.get("function", tool)
    if isinstance(inner, dict) and isinstance(inner.get("parameters"), str):
        inner = inner | {"parameters": from_json(inner["parameters"], f"parameters of the tool {inner.get('name')!r}")}
    if wrap:
        return {"type": "function", "function": inner}
    return tool | {"function": inner} if "function" in tool else inner


def from_json(value: Any, called: str) -> Any:
    """Return a value that may be JSON in a text. Raises BadRow, naming what it is `called`, where the text is no JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)[:80]
        raise BadRow(f"{called} are not JSON: {reason}", "fix them") from None


def wanted(messages: list[Message], begin: int) -> Iterable[bool]:
    """Yield for each of the assistant's turns whether it is learned: from message `begin` on, unless a flag says otherwise."""
    for number, turn in enumerate(messages):
        if turn["role"] == "assistant":
            yield number >= begin and turn.get("train", True)
