"""The assistant's parts of a chat whose template has no generation marks: what each turn adds to the prompt before it.

Such a template says nothing of who wrote what, but it is asked for prompts when the model serves. So each turn of the
assistant's is rendered twice: the messages before it, as a prompt, and the messages up to it. What the second text adds to the
first is what the model has to write, as long as both are beginnings of the whole chat's text; where one is not, the chat is
refused.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from . import template_forms
from .order import behind_last_question, wanted
from .rows import BadRow, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Render = Callable[[list[Message], bool], str]  # messages and add_generation_prompt -> text
SHOWN = 24  # characters of each text, where two differ
OPENED = re.compile(r"<([\w:]*think\w*)>\s*\Z")  # thoughts that the prompt has begun
MARKED = "name a chat_template that has generation marks (docs/data.md)"


def spans(
    whole: str,
    messages: list[Message],
    learned: Sequence[bool],
    render: Render,
    control_tokens: tuple[str, ...],
    closing: str = "",
) -> list[tuple[int, int]]:
    """Return for each turn of the assistant's its (begin, end) in characters of `whole`, the text of all messages; (0, 0) for
    one that is not learned.

    learned: of each turn of the assistant's; control_tokens: the tokenizer's special tokens, of which one has to end each turn
    closing: as of closing_of()
    A turn costs two renderings, the chat's last message one.

    Raises BadRow where a rendering is no beginning of the next one, and where no special token ends a turn.
    """
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return [
        _span(whole, messages, number, render, control_tokens, closing) if is_learned else (0, 0)
        for number, is_learned in zip(numbers, learned, strict=True)
    ]


def _span(
    whole: str, messages: list[Message], number: int, render: Render, control_tokens: tuple[str, ...], closing: str
) -> tuple[int, int]:
    is_last = number + 1 == len(messages)
    prompt, after = render(messages[:number], True), whole if is_last else render(messages[: number + 1], False)
    after = after.removesuffix(closing)
    where = f"message {number + 1} of {len(messages)}"
    answers_last = not any(message["role"] == "user" for message in messages[number:])
    cure = MARKED if answers_last else f"set train_on_last_turn_only: true, or {MARKED}"
    if not after.startswith(prompt):
        problem = f"the chat template's prompt for {where} is not how it begins that message"
        raise BadRow(f"{problem}: {difference(prompt, after)}", cure)
    if not whole.startswith(after):
        problem = f"the chat template rewrites the chat up to {where} when more follows: {difference(after, whole)}"
        raise BadRow(problem, cure)
    written = after[len(prompt) :].rstrip()  # the model stops where its turn ends, and writes no line's end after it
    if not written.endswith(control_tokens):
        problem = f"no special token ends {where} as the chat template writes it: {written[-SHOWN:]!r}"
        raise BadRow(f"{problem}, so the model would never learn to stop", MARKED)
    begin = len(prompt)
    opened = OPENED.search(prompt)
    if opened:  # that there are no thoughts is no answer of the model's, as in our templates
        empty = re.match(rf"\s*</{re.escape(opened[1])}>\s*", written)
        begin += empty.end() if empty else 0
    return begin, len(prompt) + len(written)


def difference(text: str, other: str) -> str:
    """Return in words where two texts differ first."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))
    begin = max(0, same - SHOWN // 2)
    return f"at character {same:,} it has {text[begin : begin + SHOWN]!r}, then {other[begin : begin + SHOWN]!r}"


def closing_of(render: Render, control_tokens: tuple[str, ...]) -> str:
    """Return the special tokens that a template writes behind a chat's last turn and behind no other: Phi-3's and Phi-4-mini's
    <|endoftext|>, where <|end|> ends each turn. No answer has them. "": there are none.

    control_tokens: longest first, for one may end another
    """
    chat = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    try:
        after, whole = render(chat[:2], False), render(chat, False)
    except Exception:  # it refuses such a chat
        return ""
    rest = after
    while not whole.startswith(rest):
        last = next((token for token in control_tokens if rest.rstrip().endswith(token)), "")
        if not last:
            return ""
        rest = rest.rstrip().removesuffix(last)
    return after[len(rest) :] if rest.rstrip().endswith(control_tokens) else ""


def try_probes(tokenizer: "PreTrainedTokenizerBase", template: str, probes: list[Message]) -> tuple[set[int], str]:
    """Return the ids of the special tokens that end the assistant's turns in chats, and the first reason why one is refused.
    Without such a token the template cannot be rendered turn by turn.

    probes: as apply_chat_template takes them; of each the turns after the last question are tried
    """
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    longest_first = tuple(sorted(special, key=len, reverse=True))  # one may end another
    ends: set[int] = set()
    refused, raised = "", ""
    forms = template_forms.of_tokenizer(tokenizer, template)
    for probe in probes:
        messages, tools = probe["conversation"], probe["tools"]
        if messages[-1]["role"] != "assistant":
            continue

        def render(messages: list[Message], prompt: bool, tools: object = tools) -> str:
            return str(
                tokenizer.apply_chat_template(
                    forms.of(messages),
                    tools=tools,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=prompt,
                )
            )

        try:
            text = render(messages, False)
            closing = closing_of(render, longest_first)
            learned = list(wanted(messages, behind_last_question(messages)))
            parts = spans(text, messages, learned, render, longest_first, closing)
        except BadRow as error:
            refused = refused or str(error.args[0])
        except Exception as error:  # it refuses a system turn, or tools
            raised = raised or f"it refuses each chat that it is tried on: {' '.join(str(error).split())[:200]}"
        else:
            written = [text[begin:end] for begin, end in parts if end]
            ends |= {special[next(token for token in longest_first if part.endswith(token))] for part in written}
    return ends, refused or raised
