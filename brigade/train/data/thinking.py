"""What becomes of the assistant's thoughts: what the chat template makes of them, or they are cut, or all are kept.

They are a turn's reasoning_content (thinking, reasoning), or stand at the beginning of its text, as <think>...</think>.
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

from .messages import THOUGHTS
from .rows import BadRow, Message, Variables

CUT, KEEP = "cut", "keep"  # values of the recipe's key; the default, template, changes nothing
# What templates read to keep the thoughts of earlier turns -> the value that does: Qwen 3.6 and Gemma 4, LFM 2.5, GLM 4.7,
# Nemotron 3.
SWITCHES = {
    "preserve_thinking": True,
    "keep_past_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
}
_TAG = r"(?:\w+:)?think(?:ing)?"  # Seed-OSS has seed:think
_BLOCK = re.compile(  # the last is Gemma 4's
    rf"\A\s*(?:<({_TAG})>(.*?)</\1>|\[THINK\](.*?)\[/THINK\]|<\|channel>thought(.*?)<channel\|>)\s*", re.DOTALL
)
MARK = rf"</?{_TAG}>|\[/?THINK\]|<\|channel>thought\b|<channel\|>"  # a regular expression without groups
_MARK = re.compile(MARK)
# What begins thoughts in answers of other models and sets: OpenThoughts', Kimi's, Command A's, Reflection's, s1's, HuatuoGPT's.
_WORDS = "think(?:ing)?|thoughts?|reason(?:ing)?|reflection|scratchpad|analysis|rationale|cot|monologue"
_BEGUN = re.compile(
    rf"""\s*(<\|?(?:\w+[:_])?(?:{_WORDS})(?:_start|_begin)?\|?>|<\|begin_of_solution\|>|\[(?:{_WORDS})\](?!\()|◁think▷|"""
    r"<unused94>thought|<\|channel>thought|<\|channel\|>analysis|<\|im_start\|>think|## Thinking(?=\s*\n))",
    re.IGNORECASE,
)
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)  # of a template
_HAS_THOUGHTS = re.compile("think|thought|reasoning")
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
_GO_ON: Message = {"role": "user", "content": "Go on"}
_FIRST, _SECOND = "The first thought.", "The second thought."


def _answer(thought: str, within: bool = False, **more: object) -> Message:
    if within:
        return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\nDone."}
    return {"role": "assistant", "content": "Done.", "reasoning_content": thought, **more}


# Chats with thoughts before the last question: as a key, beside a call, and in the text.
_PROBES: list[list[Message]] = [
    [_GO_ON, _answer(_FIRST), _GO_ON, _answer(_SECOND)],
    [
        _GO_ON,
        _answer(_FIRST, content="", tool_calls=[_CALL]),
        {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "z"},
        {"role": "assistant", "content": "Done."},
        _GO_ON,
        _answer(_SECOND),
    ],
    [_GO_ON, _answer(_FIRST, within=True), _GO_ON, _answer(_SECOND, within=True)],
]


def cut(messages: list[Message]) -> tuple[list[Message], int]:
    """Return a chat without the assistant's thoughts, and how many turns had some.

    Raises BadRow for a turn of which nothing is left, and for one whose text has such marks elsewhere.
    """
    whole, count = [], 0
    for number, message in enumerate(messages, 1):
        if message["role"] != "assistant":
            whole.append(message)
            continue
        found = any(thoughts(message))
        turn = {key: value for key, value in message.items() if key not in THOUGHTS}
        turn["content"] = _BLOCK.sub("", turn["content"])
        mark = _MARK.search(turn["content"])
        if mark:
            problem = f"message {number} has {mark[0]!r} behind its beginning, so nothing says which thoughts to cut"
            raise BadRow(problem, "write thoughts as reasoning_content, or as <think>...</think> before the answer")
        if found and not turn["content"].strip() and not turn.get("tool_calls"):
            raise BadRow(f"message {number} is nothing but thoughts, and thinking: cut removes them", "drop the row")
        whole.append(turn)
        count += found
    return whole, count


def thoughts(message: Message) -> Iterator[str]:
    """Yield the thoughts of a turn: its keys', and those at the beginning of its text."""
    for key in THOUGHTS:
        thought = message.get(key)
        if isinstance(thought, str) and thought.strip():
            yield thought.strip()
    block = _BLOCK.match(message["content"])
    thought = (block[2] or block[3] or block[4] or "").strip() if block else ""
    if thought:
        yield thought


def in_another_format(messages: list[Message], template: str, how: str, own: Collection[str] = ()) -> Iterator[str]:
    """Yield in words that answers have thoughts in another format than their template's, or in a key and in their text, or that
    the keys for thoughts hold the mark that begins them, too.

    Where a template has no thoughts, each format is as good as another.

    template: its text; how: data.thinking; own: tokens that the recipe adds, which are meant
    """
    for message in messages:
        if message["role"] != "assistant":
            continue
        found = _BEGUN.match(message["content"])
        if found and found[1] not in own:
            mark, code = found[1], _COMMENT.sub("", template)
            is_known = mark in code or mark.replace("<", "</", 1) in code
            if not is_known and (how != "template" or _HAS_THOUGHTS.search(code)):
                yield f"{mark} at the beginning of answers (not the chat template's mark of thoughts), learned as it is"
        of_keys = len([*thoughts(message | {"content": ""})])
        if len([*thoughts(message)]) > of_keys > 0:
            yield "thoughts in a key and at the beginning of the same answer's text"
        for key in THOUGHTS:
            found = _BEGUN.match(str(message.get(key)))
            if found:
                yield f"{found[1]} at the beginning of {key}, where the chat template writes its own, learned as it is"


def starts_with_a_mark(text: str) -> bool:
    """Whether a text begins with a MARK."""
    return _MARK.match(text) is not None


def ends_thoughts(mark: str) -> bool:
    """Whether a MARK ends thoughts; the others begin them."""
    return "/" in mark or mark == "<channel|>"


def refuse_own_switch(variables: Variables) -> None:
    """Raise BadRow for a row that sets a switch of thoughts itself."""
    own = variables.keys() & SWITCHES
    if own:
        raise BadRow(f"column 'chat_template_kwargs' sets {min(own)}", "remove it there: thinking: keep decides it")


def switch(template: str, render: Callable[[list[Message], Variables], str]) -> Variables | None:
    """Return the variable with which a template shows the thoughts before the last question; {} where it shows them anyway,
    None where it cannot.

    render: messages and variables -> text
    """
    choices: list[dict[str, Any]] = [{}]
    choices += [{name: value} for name, value in SWITCHES.items() if re.search(rf"\b{name}\b", template)]
    counts = [sum(_shows(messages, variables, render) for messages in _PROBES) for variables in choices]
    return choices[counts.index(max(counts))] if any(counts) else None


def _shows(messages: list[Message], variables: Variables, render: Callable[[list[Message], Variables], str]) -> bool:
    with suppress(Exception):  # it refuses tools
        text = render(messages, variables)
        return _FIRST in text and _SECOND in text
    return False
