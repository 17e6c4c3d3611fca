"""The forms in which a chat template takes contents and the arguments of calls: tried on chats, for each takes some only."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .images import MARK
from .row_images import in_parts
from .rows import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ASKED, ANSWERED = "Which one?", "That one."
CHAT: list[Message] = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
_ARGUMENTS = {"x": "y1"}


@dataclass(frozen=True)
class Forms:
    """lists: contents are lists of parts, as SmolVLM's and LLaVA-OneVision's templates read them, which show no texts
    json_arguments: the arguments of calls are JSON in a text, as OpenAI's are and as DeepSeek's templates read them
    images: MARKs in contents are images; else they are letters, as web pages have them
    """

    lists: bool = False
    json_arguments: bool = False
    images: bool = False

    def of(self, messages: list[Message]) -> list[Message]:
        """Return messages, whose contents are texts and whose arguments are objects, in these forms."""
        messages = [turn | {"content": self._form(turn["content"])} for turn in messages]
        return [_with_json(turn) for turn in messages] if self.json_arguments else messages

    def _form(self, content: object) -> object:
        if isinstance(content, str) and self.images and (self.lists or MARK in content):
            return in_parts(content)
        return [{"type": "text", "text": content}] if isinstance(content, str) and self.lists else content


def of_tokenizer(tokenizer: "PreTrainedTokenizerBase", template: str) -> Forms:
    """Return the forms that a template takes as a tokenizer renders it."""
    return tried(lambda chat: str(tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)))


def tried(render: Callable[[list[Message]], str], images: bool = False) -> Forms:
    """Return the forms that a template takes.

    render: messages -> text; what it raises says that the template refuses them; images: of Forms
    """

    def text_of(messages: list[Message], forms: Forms = Forms()) -> str:
        with suppress(Exception):
            return render(forms.of(messages))
        return ""

    def shows(forms: Forms) -> bool:
        text = text_of(CHAT, forms)
        return ASKED in text and ANSWERED in text

    lists = not shows(Forms()) and shows(Forms(lists=True))
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": _ARGUMENTS}}
    chat: list[Message] = [
        CHAT[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": ANSWERED},
        CHAT[1],
    ]
    as_object, as_text = (text_of(chat, Forms(lists, json_arguments)) for json_arguments in (False, True))
    written = json.dumps(_ARGUMENTS)
    refused = not as_object or (written not in as_object and repr(_ARGUMENTS) in as_object)
    return Forms(lists, refused and written in as_text, images)


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
