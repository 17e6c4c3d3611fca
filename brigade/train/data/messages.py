"""Chats in one form: roles, contents, tool calls whose arguments are objects, and which turns are learned."""

import re
from contextlib import suppress
from typing import Any

from ...errors import shown
from ...errors.tables import Fields
from . import image_places, keys
from .arrow_values import DECODER, json_or
from .json_texts import from_json, value_of
from .row_images import GIVEN, INDICES, TYPES, RowImages
from .rows import BadRow, Message, not_text
from .tool_calls import calls_of, one_of, refuse_spelled

# The names of roles: OpenAI's, ShareGPT's, and those of LLaMA-Factory and ms-swift for calls and their results.
CALLS = ("function_call", "tool_call")
RESULTS = ("tool", "function", "observation", "tool_response")  # whose texts may be JSON of parts
ROLES = {role: role for role in ("system", "developer", "user", "assistant")} | {
    "human": "user",
    "gpt": "assistant",
    **dict.fromkeys(RESULTS, "tool"),
    **dict.fromkeys(CALLS, "assistant"),
}
# Keys of a message or a part that, where 0 or false, mean no loss on it. OpenAI writes weight, axolotl train, ms-swift loss and
# loss_scale, LLaMA-Factory loss_weight, XTuner output_with_loss, slime step_loss_mask. And those that mean it where 1 or true:
# torchtune writes masked.
UNTRAINED = ("weight", "train", "training", "loss", "loss_weight", "loss_scale", "loss_mask", "step_loss_mask", "trainable",
             "calculate_loss", "compute_loss", "output_with_loss")  # fmt: skip
MASKED = ("masked", "no_loss", "ignore_loss", "mask_loss")
FLAGS = frozenset((*UNTRAINED, *MASKED))
# A key that is true or false, in other spellings; `constrained` and `glossary` are others.
_MAY_FLAG = re.compile(r"(?:(?<![a-zA-Z])|(?<=[a-z])(?=[A-Z]))(?i:(?:un)?(?:train|loss|mask|learn|supervis))")
READ = frozenset(("role", "from", "content", "value", "tool_calls", "function_call", *FLAGS))
SAID = frozenset(("content", "value", "tool_calls", "function_call"))
_SPOKEN = SAID | {"text", "message", "utterance", "body"}  # the latter are not read, and give a list of turns away
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # Transformers gives templates each as the first two
PARTS = ("text", *TYPES)  # types of a content's parts
OTHER_TEXTS = ("input_text", "output_text")  # those of texts in OpenAI's Responses, which are refused
TEXTS = ("text", "value", "content")  # keys of a part that is a text
BARE = frozenset(("type", *GIVEN, *INDICES))  # of a part that is an image
LISTS = ("messages", "conversations", "conversation")  # under which an object holds its turns
# Keys beside them of a whole row; a request to a model has others.
OF_ROWS = frozenset(("id", "idx", "source", "system", "tools", "functions", "images", "metadata"))
OTHER_ROLES = ("bot", "model", "ai", "chatbot", "chatgpt")  # which no template has, in small letters
_LIST = re.compile(r"""\s*["']?(?:array\()?\[\s*(?:\\+n\s*)?\{""")  # how one begins that may be a list of parts
# How a text begins that may be a list of turns, and a role in it, in JSON (perhaps encoded twice) or Python.
_BEGINS = re.compile(r"""[\s\ufeff"'(\[]*(?:array\(\s*\[\s*)?\{\s*\\*["']""")
_NAMES = "|".join((*ROLES, *OTHER_ROLES))
_ROLE = re.compile(rf"""["'](?:role|from)\\*["']\s*:\s*\\*["'](?:{_NAMES})\\*["']""", re.IGNORECASE)
# Objects of a program, as Python prints them: OpenAI's ChatCompletionMessage, an OrderedDict.
_OBJECT = re.compile(rf"""\s*\[?(?:\w*Message|OrderedDict)\(.*\brole'?[=,]\s*["'](?:{_NAMES})["']""", re.DOTALL)


def turns(
    messages: object, unread: set[str], called: str = "messages", images: RowImages | None = None
) -> list[Message]:
    """Return messages in one form; a call that is a message of its own joins the assistant's turn before it.

    unread: a set to which the keys that nobody reads are added; called: the column, for what is wrong with it
    images: the row's, where images are read
    Raises BadRow for what is no list of turns, and for what a turn lacks.
    """
    messages = from_json(turns_from_text(messages, called), called)
    if not isinstance(messages, list) or not messages or isinstance(messages[0], str):
        problem = f"{called} is {shown(messages)}, not a list of turns"
        raise BadRow(problem, 'write [{"role": ..., "content": ...}, ...]')
    whole: list[Message] = []
    for message in messages:
        turn = _message(message, unread, images)
        last = whole[-1] if whole else {}
        joins = _role(message) in CALLS and last.get("role") == "assistant" and last.get("train") == turn.get("train")
        if joins and all(
            last.get(key) == turn[key] for key in THOUGHTS if turn.get(key)
        ):  # else turns do not alternate
            refuse_spelled(last["content"], turn["tool_calls"])
            whole[-1] = turn | last | {"tool_calls": [*last.get("tool_calls", []), *turn["tool_calls"]]}
        else:
            whole.append(turn)
    count_quoted(messages, unread)
    return whole


def count_quoted(messages: list[Message], unread: set[str]) -> None:
    """Add to `unread` that all contents of a chat are JSON of texts or parts, as in a table that has lost its types. They may be
    meant."""
    said = (message.get(key) for message in messages for key in ("content", "value"))
    texts = [text for text in said if isinstance(text, str)]
    kinds = {type(json_or(None, text) if text.lstrip().startswith(('"', "[")) else None) for text in texts}
    if len(texts) > 1 and str in kinds and kinds <= {str, list}:
        unread.add("contents that are all JSON of texts, read with its quotes and escapes")


def turns_from_text(value: object, called: str = "messages") -> Any:
    """Return the list of turns that a value is, in whatever spelling: JSON in a text (perhaps encoded twice), Python's or NumPy's
    repr, as tables in CSV hold it, an object that holds nothing but messages, an object of lists (which the datasets library
    makes of a sequence of objects), or a single message. Any other value is returned as it is: answers may be JSON, too.
    Wherever a column may hold a text or a list of turns, this is asked first.

    called: the column
    Raises BadRow for a text that begins as a list of turns does and cannot be read.
    """
    if isinstance(value, list) and not (value and isinstance(value[0], str)):
        return value
    read: Any = value
    if isinstance(value, str):
        if _OBJECT.match(value):
            raise BadRow(f"{called} is what Python prints of an object: {shown(value)}", "write its fields, as JSON")
        if not _BEGINS.match(value) or not _ROLE.search(value):
            return value
        value = value.lstrip("\ufeff")
        read = value_of(value) or _read_lines(value)
        if read is None and not _is_json_and_more(value):
            problem = (
                f"{called} seems to be a list of turns, and is neither JSON nor Python's repr of one: {shown(value)}"
            )
            raise BadRow(problem, "write the list itself, or as JSON (json.dumps)")
    if isinstance(read, dict):
        read = _turns_within(read, called)
    if isinstance(read, list) and read and all(isinstance(turn, str) for turn in read):
        read = [turn for text in read for turn in turns_from_text(text, called)]
    if _are_turns(read):
        return read
    if isinstance(read, list) and _seem_turns(read):
        odd = next(turn for turn in read if not _is_turn(turn))
        what = f"says nothing that is read: {shown(odd)}" if _role(odd) in ROLES else f"has the role {_role(odd)!r}"
        cure = f'write {{"role": ..., "content": ...}}; roles are {", ".join(ROLES)}'
        raise BadRow(f"{called} is a list of turns, and one {what}", cure)
    return value


def _is_list_of_turns(text: str) -> bool:
    """Whether a content spells a list of turns. It may well be what was asked for."""
    with suppress(BadRow):
        return not isinstance(turns_from_text(text), str)
    return True


def _turns_within(value: Fields, called: str) -> Any:
    role = _role(value)
    if isinstance(role, list):
        alike = all(isinstance(column, list) and len(column) == len(role) for column in value.values())
        rows = zip(*value.values(), strict=True) if alike else ()
        return [dict(zip(value, row, strict=True)) for row in rows]
    key = next((key for key in LISTS if key in value), None)
    others = value.keys() - {key}
    if key is None or not others <= OF_ROWS:
        return [value]
    inner = turns_from_text(value[key], called)
    if others and _are_turns(inner):
        problem = f"{called} is an object of {key} and {', '.join(sorted(others))}, as a whole row is"
        raise BadRow(problem, f"write {key} alone there, and the others into columns of their own")
    return [value] if others else inner


def _parts_from_text(text: str, role: str, unread: set[str]) -> list[Fields] | str:
    """Return the parts that a content's text spells, as turns_from_text() does with turns; else the text. `unread` gets a list of
    parts that may be what was asked for."""
    parts, known = value_of(text) if "type" in text else None, (*PARTS, *OTHER_TEXTS, *keys.PARTS.entries)
    if not isinstance(parts, list) or not all(isinstance(part, dict) and part.get("type") in known for part in parts):
        return text
    are_parts = [_is_part(part, role) for part in parts if part["type"] in (*PARTS, *OTHER_TEXTS)]
    if are_parts and all(are_parts):
        if role == "assistant":
            unread.add("answers that are a list of parts as text, read as their texts")
        return parts
    unread.add(f"contents of {role!r} that are a list of parts as text, read as letters")
    return text


def _is_part(value: Fields, role: str) -> bool:
    """Whether it is a part and nothing more. What an assistant is asked for in JSON may well have a type, too."""
    kind = value["type"]
    if kind in OTHER_TEXTS:
        return isinstance(value.get("text"), str)
    if kind in value or role == "assistant":
        return kind in value
    if kind == "text":
        return len(value) == 2 and not value.keys().isdisjoint(TEXTS)
    return value.keys() <= BARE


def _read_lines(text: str) -> list[object] | None:
    """Return the values of a text of JSON, one a line; None where it is none."""
    with suppress(ValueError, RecursionError):
        return [DECODER.decode(line) for line in text.splitlines() if line.strip()]
    return None


def _is_json_and_more(text: str) -> bool:
    """Whether a text begins with a whole value of JSON and then goes on: an answer that speaks of it."""
    with suppress(ValueError, RecursionError):
        return bool(DECODER.raw_decode(text.lstrip()))
    return False


def _are_turns(value: object) -> bool:
    """Whether a value is a list of turns: objects with a role that is read, and what was said."""
    return isinstance(value, list) and bool(value) and all(map(_is_turn, value))


def _is_turn(value: Any) -> bool:
    role = _role(value)
    return isinstance(role, str) and role in ROLES and not value.keys().isdisjoint(SAID)


def _seem_turns(values: list[Any]) -> bool:
    """Whether objects are turns of which some cannot be read: all say something in a chat's role, or an assistant speaks among
    them. Lists of rights, logs and mails have roles as well, and no assistant."""
    roles = [role.lower() for role in map(_role, values) if isinstance(role, str)]
    if not values or len(roles) < len(values):
        return False
    if all(
        role in (*ROLES, *OTHER_ROLES) and not value.keys().isdisjoint(SAID)
        for role, value in zip(roles, values, strict=True)
    ):
        return True
    speaks = [role in OTHER_ROLES or ROLES.get(role) == "assistant" for role in roles]
    spoken = [not value.keys().isdisjoint(_SPOKEN) for value in values]
    return len(values) > 1 and any(map(all, zip(speaks, spoken, strict=True)))


def _role(message: object) -> object:
    if not isinstance(message, dict):
        return None
    return message["from"] if message.get("role") is None and "from" in message else message.get("role")


def _message(message: Any, unread: set[str], images: RowImages | None) -> Message:
    role = _role(message)
    if role is None:
        raise BadRow(f"a message without a role: {repr(message)[:60]}", 'write {"role": ..., "content": ...}')
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"role {role!r} is none of {', '.join(ROLES)}", "fix the message's role")
    keys.MESSAGES.refuse(message, f"in a {role!r} turn, the key")
    content, flags = _content(message, role, unread), _flags(message, role)
    calls = _calls(message, role, content, unread)
    if role in CALLS:
        content = ""
    elif isinstance(content, str) and _LIST.match(content) and role not in RESULTS:
        content = _parts_from_text(content, ROLES[role], unread)
    if isinstance(content, list):
        content, flags_of_parts = _joined(content, role, unread, images)
        flags |= flags_of_parts
    elif isinstance(content, str) and images is not None:
        content = images.text(content, ROLES[role])
    if content is None and (calls or not keys.says_nothing(message.get("refusal"))):
        content = ""
    if not isinstance(content, str):
        raise not_text(f"the content of {role!r}", content, "give each message a text content")
    if calls:
        refuse_spelled(content, calls)
    if "<" in content:
        try:
            marks = image_places.refuse_pictures(content, ROLES[role], images is not None)
        except BadRow:
            if images is not None:  # a column may have the image, under a name that is not known
                images.refuse_overlooked()
            raise
        unread |= {f"{mark} in texts, read as letters" for mark in marks}
    if role not in RESULTS and _is_list_of_turns(content):
        unread.add(f"contents of {ROLES[role]!r} that are a list of turns as text, read as letters")
    rest = {key: value for key, value in message.items() if key not in READ and value is not None}
    whole = {"role": ROLES[role], "content": content, **rest}
    if ROLES[role] == "assistant":
        if len(set(flags.values())) > 1:
            problem = f"{' and '.join(flags)} of one turn contradict each other"
            raise BadRow(problem, "whole turns are learned or not: split the turn, or give all the same")
        whole |= {} if all(flags.values()) else {"train": False}
    elif any(flags.values()):
        named = " and ".join(flag for flag, learned in flags.items() if learned)
        raise BadRow(f"{named} asks for loss on a {role!r} turn", "loss is on the assistant's turns: remove it")
    return whole | {"tool_calls": calls} if calls else whole


def _calls(message: Message, role: str, content: object, unread: set[str]) -> list[Fields]:
    given = {
        "tool_calls": message.get("tool_calls"),
        "function_call": message.get("function_call"),
    }  # OpenAI's, new and old
    if role in CALLS:
        given[f"the content of {role!r}"] = content or [content]
    calls = [
        call for key, value in given.items() if not keys.says_nothing(value) for call in calls_of(value, key, unread)
    ]
    if calls and ROLES[role] != "assistant":
        raise BadRow(f"a {role!r} turn has tool calls, which only the assistant makes", "remove them, or fix the role")
    return calls


def _content(message: Message, role: str, unread: set[str]) -> Any:
    """Return what a message says. Raises BadRow where its two keys for it, or those for the role, contradict each other."""
    other = message.get("from", role)
    if other != role and other is not None:
        if other not in (*ROLES,):
            unread.add("key 'from' of messages")  # a person's name, perhaps
        elif (ROLES[role], role in CALLS) != (ROLES[other], other in CALLS):
            raise BadRow(f"a message's role is {role!r}, and its from {other!r}", "keep one of them")
    return _said(message, ("content", "value"), f"of a {role!r} turn")


def _said(given: Fields, names: tuple[str, ...], of: str) -> Any:
    """Return what stands under the first of these names that says something, else under the first that there is."""
    said = one_of({name: given[name] for name in names if not keys.says_nothing(given.get(name))}, of)
    return next((given[name] for name in names if given.get(name) is not None), None) if said is None else said


def _flags(content: Fields, role: str, called: str = "a {} turn") -> dict[str, bool]:
    """Return which flags a turn or a part has, and whether each says that it is learned. Raises BadRow for weights other than
    0 and 1."""
    flags: dict[str, bool] = {}
    for key, value in content.items():
        if key not in FLAGS and isinstance(value, bool) and ROLES[role] == "assistant" and _MAY_FLAG.search(key):
            problem = f"{key} {value} of {called.format(repr(role))} may say whether it is learned, and is not read"
            raise BadRow(problem, "write train: true or train: false, or remove it")
        if key not in FLAGS or value is None:
            continue
        if not isinstance(value, (int, float)) or value not in (0, 1):
            problem = f"{key} {shown(value)} of {called.format(repr(role))} is neither 0 nor 1"
            raise BadRow(problem, "a turn is trained on, or it is not")
        flags[f"{key} {value!r}"] = bool(value) != (key in MASKED)
    return flags


def _joined(parts: list[object], role: str, unread: set[str], images: RowImages | None) -> tuple[str, dict[str, bool]]:
    """Return the text of a content that is a list of parts, and the flags of its parts, which have to be alike."""
    texts, flags = [], []
    for part in parts:
        if not isinstance(part, dict):
            raise not_text(f"the content of {role!r}", parts, "give each message a text content")
        kind, read = part.get("type"), {"type", *FLAGS}
        if images is not None and kind in TYPES:
            text, known = images.part(part, ROLES[role])
            read |= known
        elif kind != "text":
            keys.PARTS.refuse({str(kind): part}, f"in the content of {role!r}, a part of type")
            raise BadRow(f"a part of type {kind!r} in the content of {role!r}", "parts are {type: text, text: ...}")
        else:
            written = _said(part, TEXTS, f"of a part in a {role!r} turn")
            if not isinstance(written, str):
                raise not_text(f"a part of the content of {role!r}", written, "give each part a text")
            text = written if images is None else images.text(written, ROLES[role])
            read.update(TEXTS)
            keys.MESSAGES.refuse(part, f"in a part of a {role!r} turn, the key", but=read)
        texts.append(text)
        flags.append(_flags(part, role, "a part of a {} turn"))
        unread |= {f"key {key!r} of parts" for key in part.keys() - read if not keys.says_nothing(part[key])}
    if ROLES[role] == "assistant" and len({all(flag.values()) for flag in flags}) > 1:
        named = " and ".join(next(flag for flag in flags if not all(flag.values())))
        problem = f"{named} of one part of a {role!r} turn, and not of all of its parts"
        raise BadRow(problem, "whole turns are learned or not: flag all parts of a turn alike, or remove the flags")
    of_parts = {name.replace(" ", " of parts ", 1): learned for flag in flags for name, learned in flag.items()}
    return "".join(texts), of_parts
