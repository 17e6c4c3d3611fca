"""What a chat template raises, in words: it may refuse a chat, or fail at it as any program does."""

import re
from types import TracebackType
from typing import Any

from ...errors import UserError
from .rows import BadRow, Message


def explained(error: Exception, messages: list[Message], template: str, images: bool = False) -> UserError | BadRow:
    """Return the error to raise for what a template raised at a chat. template: its text; images: whether the chat has some"""
    from jinja2.exceptions import TemplateSyntaxError, UndefinedError

    token = re.match(r"'(\w+_token)' is undefined", str(error)) if isinstance(error, UndefinedError) else None
    if token:
        problem = f"the chat template writes the tokenizer's {token[1]}, and the tokenizer has none"
        return BadRow(problem, "name a chat_template without it, e.g. chatml, or a tokenizer that has it")
    if isinstance(error, TemplateSyntaxError):  # no row's fault
        return UserError(f"the chat template, line {error.lineno}", str(error), "fix the template")
    if images and isinstance(error, TypeError):  # in a tool's turn, say
        problem = f"the chat template reads no list of parts in one of its turns: {error}"
        return BadRow(problem, "drop the row, or name a chat_template that does")
    wanted = _undefined(error.__traceback__) if "Undefined" in str(error) else _concatenated(error, template)
    reason = f"{error}{f', for {wanted}' if wanted and wanted not in str(error) else ''}"
    problem = f"the chat template: {reason} (a chat that begins {str(messages)[:80]})"
    if "has no attribute 'function'" in reason:  # each call has one: it is a tool's definition
        return BadRow(
            problem, 'write each of the tools as {"type": "function", "function": {"name": ..., "parameters": {...}}}'
        )
    if "developer" not in template and any(message["role"] == "developer" for message in messages):
        return BadRow(problem, "write the role 'developer' as 'system', or name a chat_template that has it (gpt-oss)")
    return BadRow(problem, "fix the template or the chat")


def _undefined(traceback: TracebackType | None) -> str:
    """Return what a template looked for in vain ("'dict object' has no attribute 'parameters'") where it failed; "" where it
    looked for nothing. An undefined value says so itself where it is used: in the frames of the traceback stands the value."""
    from jinja2 import Undefined
    from jinja2.exceptions import UndefinedError

    found = ""
    while traceback:
        for value in traceback.tb_frame.f_locals.values():
            if isinstance(value, Undefined):
                try:
                    iter(value + "")
                except UndefinedError as error:
                    found = str(error)
        traceback = traceback.tb_next
    return found


def _concatenated(error: Exception, template: str) -> str:
    """Return which value a template adds to a text though it is none ("c.function.arguments"); "" where that is not known. Jinja
    gives a traceback the lines of the template, and its variables."""
    kind = re.search(r'can only concatenate str \(not "(\w+)"\)', str(error))
    lines, traceback = template.splitlines(), error.__traceback__
    found = ""
    while kind and traceback:
        frame = traceback.tb_frame
        at = traceback.tb_lineno if "__jinja_exception__" in frame.f_globals else 0
        line = "".join(lines[max(at - 1, 0) : at])
        for path in re.findall(r"[A-Za-z_]\w*(?:\.\w+|\[['\"]\w+['\"]\])*", line):
            value: Any = frame.f_locals
            for key in re.findall(r"\w+", path):
                value = value.get(key, error) if isinstance(value, dict) else error  # an error: there is none
            if type(value).__name__ == kind[1]:
                found = path
        traceback = traceback.tb_next
    return found
