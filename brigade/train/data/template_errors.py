"""What a chat template raises, in words: it may refuse a chat, or fail at it as any program does."""

import re
from types import TracebackType
from typing import Any

from ...errors import UserError
from .rows import BadRow


def explained(error: Exception, messages: list[dict[str, Any]], images: bool = False) -> UserError | BadRow:
    """Return the error to raise for what a template raised at a chat. images: whether it has some"""
    from jinja2.exceptions import TemplateSyntaxError, UndefinedError

    if isinstance(error, UndefinedError) and (token := re.match(r"'(\w+_token)' is undefined", str(error))):
        problem = f"the chat template writes the tokenizer's {token[1]}, and the tokenizer has none"
        return BadRow(problem, "name a chat_template without it, e.g. chatml, or a tokenizer that has it")
    if isinstance(error, TemplateSyntaxError):  # no row's fault
        return UserError(f"the chat template, line {error.lineno}", str(error), "fix the template")
    if images and isinstance(error, TypeError):  # in a tool's turn, say
        problem = f"the chat template reads no list of parts in one of its turns: {error}"
        return BadRow(problem, "drop the row, or name a chat_template that does")
    wanted = _undefined(error.__traceback__) if "Undefined" in str(error) else ""
    reason = f"{error}{f', for {wanted}' if wanted and wanted not in str(error) else ''}"
    problem = f"the chat template: {reason} (a chat that begins {str(messages)[:80]})"
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
