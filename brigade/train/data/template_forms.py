"""The forms in which a chat template takes contents and the arguments of calls: tried on chats, for each takes some only."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import UserError
from .images import MARK
from .row_images import in_parts
from .rows import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ASKED, ANSWERED = "Which one?", "That one."
CHAT: list[Message] = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
_FURTHER = "Number seven."  # said by a system's turn or a tool
_ARGUMENTS = {"x": "y1"}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": _ARGUMENTS}}
_WITH_SYSTEM: list[Message] = [{"role": "system", "content": _FURTHER}, *CHAT]
_WITH_CALL: list[Message] = [
    CHAT[0],
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": _FURTHER},
    CHAT[1],
]
_SIDES = [frozenset(roles) for roles in ((), ("user", "assistant"), ("user",), ("assistant",))]


@dataclass(frozen=True)
class Forms:
    """lists: the roles whose contents are lists of parts: all of them in SmolVLM's and LLaVA-OneVision's templates, which show no
        texts, and some in others
    json_arguments: the arguments of calls are JSON in a text, as OpenAI's are and as DeepSeek's templates read them
    null_contents: the content of a turn that only calls is None, as OpenAI's is and as DeepSeek-V3's template asks for
    images: MARKs in contents are images; else they are letters, as web pages have them
    """

    lists: frozenset[str] = frozenset()
    json_arguments: bool = False
    null_contents: bool = False
    images: bool = False

    def of(self, messages: list[Message]) -> list[Message]:
        """Return messages, whose contents are texts and whose arguments are objects, in these forms."""
        messages = [turn | {"content": self._form(turn)} for turn in messages]
        return [_with_json(turn) for turn in messages] if self.json_arguments else messages

    def _form(self, turn: Message) -> object:
        content, in_list = turn["content"], turn["role"] in self.lists
        if self.null_contents and not content and turn.get("tool_calls"):
            return None
        if isinstance(content, str) and self.images and (in_list or MARK in content):
            return in_parts(content)
        return [{"type": "text", "text": content}] if isinstance(content, str) and in_list else content

    def both_of(self, *roles: str) -> list["Forms"]:
        """Return these forms with lists of further roles and without, first as the user's are."""
        both = [self, replace(self, lists=self.lists.union(roles))]
        return both[::-1] if "user" in self.lists else both


def of_tokenizer(tokenizer: "PreTrainedTokenizerBase", template: str) -> Forms:
    """Return the forms that a template takes as a tokenizer renders it."""
    return tried(lambda chat: str(tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)))


def tried(render: Callable[[list[Message]], str], images: bool = False) -> Forms:
    """Return the forms that a template takes.

    render: messages -> text; what it raises says that the template refuses them; images: of Forms
    """

    def text_of(messages: list[Message], forms: Forms) -> str:
        try:
            return render(forms.of(messages))
        except UserError:  # it takes for ever, and would in each form
            raise
        except Exception:
            return ""

    def taken(messages: list[Message], choices: list[Forms], *shown: str) -> Forms:
        """Return the first of these forms in which all of these texts are shown, else the first."""
        texts = ((forms, text_of(messages, forms)) for forms in choices)
        return next((forms for forms, text in texts if all(_shows(text, one) for one in shown)), choices[0])

    forms = taken(CHAT, [Forms(lists) for lists in _SIDES], ASKED, ANSWERED)
    forms = taken(_WITH_SYSTEM, forms.both_of("system", "developer"), _FURTHER)

    def of_calls(forms: Forms) -> Forms:
        objects = taken(_WITH_CALL, forms.both_of("tool"), _FURTHER)
        texts = taken(_WITH_CALL, replace(forms, json_arguments=True).both_of("tool"), _FURTHER)
        as_object, as_text = text_of(_WITH_CALL, objects), text_of(_WITH_CALL, texts)
        written = json.dumps(_ARGUMENTS)
        refused = not as_object or (written not in as_object and repr(_ARGUMENTS) in as_object)
        return texts if refused and written in as_text else objects

    empty, null = of_calls(forms), of_calls(replace(forms, null_contents=True))
    shows = [_ARGUMENTS["x"] in text_of(_WITH_CALL, forms) for forms in (empty, null)]
    return replace(null if shows == [False, True] else empty, images=images)


def _shows(text: str, said: str) -> bool:
    """Whether a rendered text has what was said, and not as Python or JSON spells a part of a list."""
    (part,) = in_parts(said)
    return said in text and repr(part) not in text and json.dumps(part) not in text


def _with_json(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": _as_json(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _as_json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
