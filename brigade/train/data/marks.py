"""Templates with generation marks, tried: a sample begins with the prompt that asks for its answer, an end of the answer is
learned, and nothing that others wrote is learned.

A template that is rendered turn by turn has all this by its making (turn_by_turn.py). Marks are only claims, so they are tried on
chats of the row's kind: the same roles, keys and variables, with words of ours. Each kind is tried once.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...errors import UserError
from ...errors.tables import Fields
from .messages import THOUGHTS
from .order import behind_last_question
from .rows import BadRow, Chat, Message, Variables
from .turn_by_turn import SHOWN, difference

AS_SAMPLE = "as_sample"  # our templates then write a chat's last answer behind its prompt, with its end
Render = Callable[[Chat], tuple[str, list[tuple[int, int]]]]  # to text, and the spans that are marked
LAST, WITHIN, EARLIER = "last", "within", "earlier"  # before the last question; behind it, but not the chat's end
KINDS = 1024  # that are remembered: variables may differ from row to row
UNTAUGHT = (
    "an empty block of thoughts that has no loss stands before the answer: asked to think, the model writes before it what it "
    "wrote before training"
)
REWRITTEN = (
    "an answer that is not the chat's last begins otherwise than behind its prompt, as the chat template writes earlier turns: "
    "train_on_last_turn_only: true leaves those before the last question out"
)
PROMPTED = "generation marks hold what the prompt writes before an answer, which has no loss all the same"
BLANKS = "the chat template writes other blanks before an answer than its prompt does"
SAID = (UNTAUGHT, REWRITTEN, PROMPTED, BLANKS)
_TAG = r"(?:[\w:]*think\w*)"
_EMPTY = re.compile(rf"\s*(?:(?:<{_TAG}>\s*)?</{_TAG}>|(?:\[THINK\]\s*)?\[/THINK\])\s*")
_INLINE = re.compile(rf"</?{_TAG}>|\[/?THINK\]")  # thoughts in a text: the template divides it
_SYSTEM, _ASKED, _ANSWER, _THOUGHT = "Be brief.", "Which one?", "That one.", "It was blue."
_RESULT, _NEXT, _DONE = "Nine of ten.", "What else?", "All done."
_CALL = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": {"what": "colour"}}}
_CURE = "name another chat_template, or mend this one"


class Kind(NamedTuple):
    """What the beginning of an assistant's turn may depend on. thoughts: keys that are texts, and whether they say something;
    before: those of the turn that called tools before it, None: it follows a question; history: those of an answer before
    the last question, None: there is none; variables: as JSON"""

    place: str
    says: bool
    calls: bool
    thoughts: tuple[tuple[str, bool], ...]
    before: tuple[tuple[str, bool], ...] | None
    history: tuple[tuple[str, bool], ...] | None
    system: str
    tools: bool
    variables: str


class Verdict(NamedTuple):
    """problem, cure: why the turn cannot be learned, or ""; untaught: whether an empty block of thoughts without a loss stands
    before it; prompted: what its marks begin with and the prompt writes; blanks: whether the prompt ends with other blanks"""

    problem: str = ""
    cure: str = ""
    untaught: bool = False
    prompted: str = ""
    blanks: bool = False


class Marks:
    """The checks of a run's templates with generation marks.

    render: of Chats, without AS_SAMPLE; control_tokens: the tokenizer's special tokens, longest first; tool: a definition
    """

    def __init__(self, render: Render, control_tokens: tuple[str, ...], tool: Fields) -> None:
        self.render, self.control_tokens, self.tool = render, control_tokens, tool
        self.control = re.compile("|".join(map(re.escape, control_tokens)) or "(?!)")
        self.tried = functools.lru_cache(KINDS)(self._tried)
        self.ends_behind = functools.lru_cache(2)(self._ends_behind)

    def check(
        self, chat: Chat, learned: Sequence[bool], text: str, spans: list[tuple[int, int]]
    ) -> tuple[list[tuple[int, int]], tuple[str, ...]]:
        """Return the spans without what prompts write and with the token that ends them, and which of SAID is true of a row.
        Raises BadRow where its last answer cannot be learned as it is marked, and UserError where no answer can.

        learned: of each turn of the assistant's; text, spans: what the messages are rendered as
        """
        messages, tools = chat.messages, bool(chat.tools)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        said, prompted = set[str](), set[str]()
        for number, is_learned in zip(turns, learned, strict=True):
            if not is_learned:
                continue
            kind = _kind_of(messages, number, tools, chat.variables)
            found = self.tried(kind)
            if kind.place == LAST:
                if found is None or any(_INLINE.search(messages[turn]["content"]) for turn in turns):
                    # The template refuses our words, or divides a text.
                    prompt = self.render(chat._replace(messages=messages[:number]).asking())[0]
                    found = self._judged(text, spans, prompt, f"message {number + 1} of {len(messages)}", tools)
                if found.problem:
                    raise self._refusal(found, tools)
            elif found and found.problem:
                said.add(REWRITTEN)
            if found:
                said |= {UNTAUGHT} if found.untaught else set()
                said |= {BLANKS} if found.blanks else set()
                prompted.add(found.prompted)
        headers = sorted(prompted - {""}, key=len, reverse=True)
        if headers:
            said.add(PROMPTED)
            spans = [_without(headers, text, *span) for span in spans]
        if self.ends_behind(tools):
            spans = [self.with_end(text, *span) for span in spans]
        return spans, tuple(sorted(said))

    def _refusal(self, found: Verdict, tools: bool) -> BadRow | UserError:
        """Return the row's error, or the template's where it can learn no answer: neither plain ones, nor thoughts."""
        plain = Kind(LAST, True, False, (), None, None, "", tools, "{}")
        others = plain._replace(thoughts=((THOUGHTS[0], True),)), plain._replace(variables='{"enable_thinking": false}')
        first, *more = (self.tried(kind) for kind in (plain, *others))
        if first and first.problem and all(verdict is None or verdict.problem for verdict in more):
            return UserError("the chat template", first.problem, first.cure)
        return BadRow(found.problem, found.cure)

    def with_end(self, text: str, begin: int, end: int) -> tuple[int, int]:
        """Return a marked span with the special token after it, where it ends with none."""
        behind = self.control.match(text, end)
        if behind and begin < end and not text[begin:end].rstrip().endswith(self.control_tokens):
            return begin, behind.end()
        return begin, end

    def _ends_behind(self, tools: bool) -> bool:
        """Whether the template's marks leave out the special token after an answer, as LLaVA-OneVision's do: an answer without
        it would never end. gpt-oss's leave out one after earlier answers, on purpose."""
        chat = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWER}]
        try:
            text, spans = self.render(Chat(chat, [self.tool] if tools else None))
        except Exception:  # it refuses such a chat
            return False
        return bool(spans) and self.with_end(text, *spans[-1]) != spans[-1]

    def _tried(self, kind: Kind) -> Verdict | None:
        """Return what is found for turns of a kind; None where the template refuses a chat of our words."""
        messages, number = _chat_of(kind)
        chat = Chat(messages, [self.tool] if kind.tools else None, json.loads(kind.variables))
        try:
            text, spans = self.render(chat)
            prompt = self.render(chat._replace(messages=messages[:number]).asking())[0]
        except Exception:
            return None
        where = "an answer" + (" with thoughts" if any(filled for _, filled in kind.thoughts) else "")
        found = self._judged(text, spans, prompt, where, kind.tools, kind.place == LAST)
        own = "".join(text[begin:end] for begin, end in spans)
        others = [word for word in (_SYSTEM, _ASKED, _RESULT) if word in own]
        if not found.problem and others:
            turn = {_SYSTEM: "the system's", _ASKED: "the user's", _RESULT: "a tool's"}[others[0]]
            return Verdict(f"the chat template's generation marks hold {turn} turn, which would be learned", _CURE)
        if not found.problem and kind.says and _ANSWER in text and _ANSWER not in own:
            return Verdict("the chat template's generation marks leave the assistant's text out", _CURE)
        return found

    def _judged(
        self, text: str, spans: list[tuple[int, int]], prompt: str, where: str, tools: bool, ends: bool = True
    ) -> Verdict:
        """Return what is found for a turn, the chat's last if it `ends` it. prompt: what asks for it; where: its name"""
        # LLaVA-OneVision's prompt ends with a line's end, where its chats have a blank and a line's end.
        blanks = not text.startswith(prompt) and text.startswith(prompt.rstrip())
        prompt = prompt.rstrip() if blanks else prompt
        begin = next((begin for begin, end in spans if end > len(prompt)), None)
        if not text.startswith(prompt) or (blanks and begin is not None and text[len(prompt) : begin].strip()):
            problem = f"the chat template's prompt for {where} is not how it begins that message"
            cure = "set what the prompt reads in the row's chat_template_kwargs (enable_thinking, say), or use thinking: cut"
            return Verdict(f"{problem}: {difference(prompt, text)}", f"{cure}; or {_CURE}")
        if begin is None:
            return Verdict(f"the chat template's generation marks hold nothing of {where}", _CURE)
        prompted = text[begin : len(prompt)]
        gap = text[len(prompt) : begin]
        empty = bool(_EMPTY.fullmatch(gap))
        if gap.strip(" ") and not empty and not blanks:  # a token may hold a blank and a word
            problem = (
                f"the model has to write {gap[:SHOWN]!r} before {where}, and it is not within the generation marks"
            )
            return Verdict(problem, "let add_generation_prompt write it, or put it behind {% generation %}")
        if ends:
            first, last = spans[-1]
            first, last = self.with_end(text, first, last) if self.ends_behind(tools) else (first, last)
            if not text[first:last].rstrip().endswith(self.control_tokens):
                shown = text[max(begin, last - SHOWN) : last]
                problem = f"no special token of the tokenizer ends {where} within the generation marks: {shown!r}"
                cure = "end it with the tokenizer's eos_token, or add the token that ends it: add_special_tokens"
                return Verdict(f"{problem}, so the model would never learn to stop", cure)
        return Verdict(untaught=empty, prompted=prompted if prompted.strip() else "", blanks=blanks)


def _without(headers: list[str], text: str, begin: int, end: int) -> tuple[int, int]:
    return begin + next((len(header) for header in headers if text.startswith(header, begin, end)), 0), end


def _thoughts(message: Message) -> tuple[tuple[str, bool], ...]:
    written = ((key, message.get(key)) for key in THOUGHTS)
    return tuple(
        (key, not isinstance(value, str) or bool(value.strip())) for key, value in written if value is not None
    )


def _kind_of(messages: list[Message], number: int, tools: bool, variables: Variables) -> Kind:
    message, behind = messages[number], messages[number + 1 :]
    asked = any(turn["role"] == "user" for turn in behind)
    begin = behind_last_question(messages[:number])
    loop = [turn for turn in messages[begin:number] if turn["role"] == "assistant"]
    earlier = [turn for turn in messages[:begin] if turn["role"] == "assistant"]
    place = EARLIER if asked else WITHIN if behind else LAST
    of_last = place == LAST  # what stands before another turn is of no matter
    return Kind(
        place,
        bool(message["content"].strip()),
        bool(message.get("tool_calls")),
        _thoughts(message),
        _all_thoughts(loop) if loop and messages[number - 1]["role"] == "tool" else None,
        _all_thoughts(earlier) if earlier and of_last else None,
        messages[0]["role"] if messages[0]["role"] in ("system", "developer") else "",
        tools,
        json.dumps(variables, sort_keys=True, default=repr),
    )


def _all_thoughts(turns: list[Message]) -> tuple[tuple[str, bool], ...]:
    return tuple(sorted(set(itertools.chain.from_iterable(map(_thoughts, turns)))))


def _chat_of(kind: Kind) -> tuple[list[Message], int]:
    """Return a chat with a turn of this kind, and the turn's number."""

    def answer(text: str, thoughts: tuple[tuple[str, bool], ...], calls: bool) -> Message:
        turn = {"role": "assistant", "content": text} | {key: _THOUGHT if filled else "" for key, filled in thoughts}
        return turn | {"tool_calls": [_CALL]} if calls else turn

    def asked(text: str) -> Message:
        return {"role": "user", "content": text}

    result = {"role": "tool", "name": "look_up", "tool_call_id": "call00001", "content": _RESULT}
    messages = [{"role": kind.system, "content": _SYSTEM}] if kind.system else []
    if kind.history is not None:
        messages += [asked(_NEXT), answer(_DONE, kind.history, calls=False)]
    messages.append(asked(_ASKED))
    if kind.before is not None:
        messages += [answer("", kind.before, calls=True), result]
    number = len(messages)
    messages.append(answer(_ANSWER if kind.says else "", kind.thoughts, kind.calls))
    if kind.place != LAST:
        done = answer(_DONE, (), calls=False)
        more = [result] if kind.calls or kind.place == WITHIN else []
        if kind.place == EARLIER:
            more += [done, asked(_NEXT)] if more else [asked(_NEXT)]
        messages += [*more, done]
    return messages, number
