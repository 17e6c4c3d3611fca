"""A row as text of which a part is supervised: chats through their template, pairs of prompt and completion, and texts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ...errors import shown
from .arrow_values import json_or
from .images import ImageReader, ImageSource
from .json_texts import from_any_text, value_of
from .keys import PAIRS, WEIGHT, Columns, Row, blank, names_of, says_nothing
from .marks import AS_SAMPLE
from .messages import count_quoted, turns, turns_from_text
from .order import NO_ANSWER, behind_last_question, check_order, wanted
from .rendered import repeats
from .row_images import RowImages
from .rows import BadRow, Chat, Message, Variables, not_text
from .tool_calls import holds_null, tool_definitions

# What other sets call the columns, in small letters, for the cure of a row that has none of ours.
USUAL = {
    "messages": ("conversations", "conversation", "dialogue", "dialog", "chat", "turns"),
    "prompt": ("instruction", "question", "query", "problem", "input", "user", "human"),
    "completion": ("output", "response", "answer", "answers", "solution", "assistant", "target"),
    "text": ("content", "body", "article", "document"),
}
KINDS = ("messages", "prompt", "text")
NULLS = "in CSV, dataset_name reads the words NULL, None, nan and NA as null, and train_file reads them as texts"
HEAVIEST = 1e9  # a weight: a step's sum of them stays far from the end of fp32
SIDES = ("user", "assistant")
ALPACA = "instruction"  # a prompt's column of this name is joined with one called input
FOR_TEMPLATES = ("system", "history", "tools", "functions", "chat_template_kwargs")  # which a text has no place for
# What a row's chat_template_kwargs may not set, for it is how samples are rendered.
OURS = ("messages", "conversations", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
        "return_assistant_tokens_mask", AS_SAMPLE)  # fmt: skip


@dataclass(frozen=True)
class Text:
    """What is to be tokenised.

    spans: supervised parts as (begin, end) in characters; plain: parts in which no special token is meant, likewise
    rendered: whether a chat template has written it, special tokens included; splits: whether a long one becomes several samples
    counts: of encoded.COUNTED; unread: what of its row nobody read, in words
    desirable: whether it is neither the worse answer of a pair nor labelled bad
    images: in the order of their places; expansions: what stands in the text for each
    weight: of its tokens' losses
    """

    text: str
    spans: list[tuple[int, int]]
    rendered: bool = False
    splits: bool = False
    plain: tuple[tuple[int, int], ...] = ()
    counts: tuple[int, ...] = (0, 0, 0, 0)
    unread: tuple[str, ...] = ()
    desirable: bool = True
    images: tuple[ImageSource, ...] = ()
    expansions: tuple[str, ...] = ()
    weight: float = 1.0


class Templates(Protocol):
    """What renders chats.

    joins: whether prompt and completion are joined as they are, for want of a chat template
    last_turn_only: whether what the assistant writes before the last user's turn is not learned
    """

    @property
    def joins(self) -> bool: ...

    @property
    def last_turn_only(self) -> bool: ...

    def render(self, chat: Chat, learned: Sequence[bool] | None = None, images: Sequence[ImageSource] = ()) -> Text:
        """Return a chat as text, with all spans of the assistant's, and the keys of messages and variables that the template
        does not read. Raises BadRow.

        learned: of each turn of the assistant's; a span that is not learned may be (0, 0). None: the chat is a prompt
        images: those whose MARKs stand in the messages
        """
        ...


def kind_of(row: Row) -> str:
    """Return which of KINDS a row holds, first one that data.columns names. Raises BadRow, listing what it has instead."""
    named = {"prompt" if key == "completion" else key for key in row.columns}
    names = {kind: row.name(kind) for kind in sorted(KINDS, key=lambda kind: kind not in named) if row.has(kind)}
    for kind, column in names.items():
        if row.content[column] is not None:
            return kind
    null = [*names.values()]
    if null:
        raise BadRow(f"{' and '.join(map(repr, null))} is null", f"give the row a value, or drop it; {NULLS}")
    there = ", ".join(map(repr, row.content)) or "nothing"
    offered = {key: name for key in USUAL if (name := usual(row, key))}
    lists = {name: turns_from_text(value, name) for name, value in row.content.items()}
    chats = [name for name, value in lists.items() if isinstance(value, list) and value and _is_turn(value[0])]
    if chats:
        offered = {"messages": chats[0]}
    pairs = ", ".join(f"{key}: {name}" for key, name in offered.items())
    cure = f"{{{pairs}}}" if pairs else "{messages: NAME}, {prompt: NAME, completion: NAME} or {text: NAME}"
    problem = f"none of the columns {', '.join(repr(row.name(kind)) for kind in KINDS)} here, only {there}"
    raise BadRow(problem, f"name yours: columns: {cure}")


def _is_turn(value: object) -> bool:
    return isinstance(value, dict) and not value.keys().isdisjoint(("role", "from", "speaker"))


def usual(row: Row, key: str) -> str | None:
    """Return the row's column by the name that other sets have for what `key` is here; None where there is none."""
    there = {name.lower(): name for name in row.content}
    return next((there[name] for name in USUAL[key] if name in there), None)


def convert(content: object, columns: Columns, templates: Templates, reader: ImageReader | None = None) -> Text | None:
    """Return a row as text with its supervised part, or None for a `text` of nothing but white space: crawled sets have such
    rows, and nothing is to be learnt from them. reader: of images, where rows may have some. Raises BadRow."""
    if not isinstance(content, dict):
        raise BadRow(f"not an object of columns: {repr(content)[:60]}", 'write {"messages": [...]}')
    row = Row(content, columns, images=reader is not None)
    kind = kind_of(row)
    images = RowImages(row, reader) if reader else None
    if kind == "text":
        text = _text(row)
        if images:
            images.refuse_any("a text")
    elif kind == "messages":
        text = chat(row, turns(row.get("messages"), row.said, images=images), 0, templates, images)
    else:
        text = pair(row, templates, images=images)
    if images:
        images.refuse_overlooked()
    if text and WEIGHT in columns:
        text = replace(text, weight=weight_of(row))
    return text and with_unread(row, text)


def weight_of(row: Row) -> float:
    """Return what data.columns names as a row's weight. A number may be a text, as CSV has no others. Raises BadRow."""
    name, value = row.name(WEIGHT), row.get(WEIGHT)
    if says_nothing(value):
        problem = f"column {name!r} holds no weight, and data.columns says that each row has one"
        raise BadRow(problem, "give the row a number, 1 where it is as good as any")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= HEAVIEST:
        problem = f"column {name!r} is {shown(value)}, not a weight"
        raise BadRow(problem, f"give a number from 0 to {HEAVIEST:g}; a row of weight 0 teaches nothing")
    return number


def with_unread(row: Row, text: Text, *others: Text) -> Text:
    """Return the first text of a row with all that is to be said of the row and of its texts."""
    unread = row.notes().union(*(each.unread for each in (text, *others)))
    return replace(text, unread=tuple(sorted(unread)))


def _text(row: Row) -> Text | None:
    text = row.get("text")
    if not isinstance(text, str):
        raise not_text("the text", text, "give each row a text")
    name = row.name("text")
    if not isinstance(turns_from_text(text, f"column {name!r}"), str):
        problem = f"column {name!r} is a list of turns, and would be learned as the letters that spell it"
        raise BadRow(problem, f"name it so: columns: {{messages: {name}}}")
    return Text(text, [(0, len(text))], splits=True) if not blank(text) else None


def pair(row: Row, templates: Templates, learns_history: bool = True, images: RowImages | None = None) -> Text:
    """Return prompt and completion as text. They are two texts, which become turns of user and assistant where there is a chat
    template, or at least one is a list of messages, whose other side may be a text. Raises BadRow.

    learns_history: whether answers in a column `history` are supervised; images: the row's, where images are read
    """
    prompt, completion = (turns_from_text(row.get(key), row.name(key)) for key in ("prompt", "completion"))
    if completion is None and row.has("completion"):
        raise BadRow(f"column {row.name('completion')!r} is null, so nothing is supervised", f"{NO_ANSWER}; {NULLS}")
    if completion is None:
        problem = f"a prompt without a column {row.name('completion')!r}, only {', '.join(map(repr, row.content))}"
        raise BadRow(problem, f"name yours: columns: {{completion: {usual(row, 'completion') or 'NAME'}}}")
    if isinstance(prompt, str) and isinstance(completion, str):
        return exchange(row, prompt, completion, templates, learns_history, images)
    for key, side in (("prompt", prompt), ("completion", completion)):
        if not isinstance(side, (str, list)):
            raise not_text(f"column {row.name(key)!r}", side, "give two texts, or two lists of messages")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": question(row, prompt)}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if len(completion) > len(prompt) and completion[: len(prompt)] == prompt:  # a whole chat, as UltraFeedback's are
        completion = completion[len(prompt) :]
    before = turns(prompt, row.said, row.name("prompt"), images)
    after = turns(completion, row.said, row.name("completion"), images)
    count_quoted([*prompt, *completion], row.said)
    if not any(message["role"] == "assistant" for message in after):
        raise BadRow("the completion has no assistant turn, so nothing is supervised", NO_ANSWER)
    return chat(row, before + after, len(before), templates, images)


def exchange(
    row: Row,
    prompt: str,
    completion: str,
    templates: Templates,
    learns_history: bool = True,
    images: RowImages | None = None,
) -> Text:
    """Return two texts as one, with what other columns say of the chat that they become; else as of pair()."""
    if blank(completion):
        raise BadRow("the completion is empty, so nothing is supervised", "give each row a completion")
    texts = _texts_within(prompt, completion)
    if texts:
        if texts == 1:
            problem = "prompt and answer are each a text in a list, spelled as JSON, and would be read as letters"
            raise BadRow(problem, "write the texts themselves, or messages")
        row.said.add("prompts and answers that are lists of texts as JSON, read as letters")
    count_quoted([{"content": prompt}, {"content": completion}], row.said)
    prompt = question(row, prompt)
    if repeats(prompt, [completion]):
        row.said.add("completions that begin with their prompt, which is learned again")
    if templates.joins:
        missed = [row.name(key) for key in FOR_TEMPLATES if not says_nothing(row.get(key))]
        if missed:
            problem = (
                f"column {missed[0]!r} beside two texts, and without a chat template nothing says how it is written"
            )
            raise BadRow(problem, "set chat_template, or leave the column out on purpose: columns: {ignore: ...}")
        if images:
            images.refuse_any("a pair that is joined without a chat template")
        return Text(prompt + completion, [(len(prompt), len(prompt) + len(completion))], counts=(0, 0, 0, 1))
    exchanges = [*_history(row), (prompt, completion)]
    named = [{"role": role, "content": text} for pair in exchanges for role, text in zip(SIDES, pair, strict=True)]
    whole = turns(named, row.said, images=images)
    return chat(row, whole, 0 if learns_history else len(named) - 1, templates, images)


def _texts_within(*spelled: str) -> int:
    """Return how many texts each of these texts holds, as lists in JSON; 0 where one is not, or they are not alike."""
    counts = set[int]()
    for text in spelled:
        value = json_or(None, text) if text.startswith('["') else None
        counts.add(len(value) if value and all(isinstance(each, str) for each in value) else 0)
    return counts.pop() if len(counts) == 1 else 0


def question(row: Row, prompt: str) -> str:
    """Return a prompt that is a text, with Alpaca's `input` as its second line. Raises BadRow for a column beside it that
    belongs to the question and is not read."""
    if row.name("prompt") == ALPACA or "input" in row.columns:
        beside = row.get("input") or ""
        if not isinstance(beside, str):
            raise not_text(f"column {row.name('input')!r}", beside, "give a text, or ignore the column")
        prompt = "\n".join(part for part in (prompt, beside) if part)
    PAIRS.refuse(row.content, "column", but=row.asked | names_of(row.columns))
    return prompt


def _history(row: Row) -> list[tuple[str, str]]:
    """Return the questions and answers before the prompt, as sets for Alpaca and LLaMA-Factory have them: all answers are
    learned."""
    given = row.get("history") or []
    read = value_of(given) if isinstance(given, str) else None
    history = given if read is None else read
    pairs = isinstance(history, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in history
    )
    if not pairs:
        cure = f"give pairs of texts: [[question, answer], ...]; or columns: {{ignore: {row.name('history')}}}"
        raise BadRow(f"column {row.name('history')!r} is {shown(history)}, not the turns before the prompt", cure)
    return [(question, answer) for question, answer in history]


def chat(row: Row, whole: list[Message], begin: int, templates: Templates, images: RowImages | None = None) -> Text:
    """Return messages through the template, with what other columns say of the chat; supervised from message `begin` on.
    images: the row's, where images are read. Raises BadRow."""
    name = row.name("system")
    system = turns_from_text(row.get("system"), name)
    if system:
        if not isinstance(system, str):
            raise not_text(f"column {name!r}", system, "give a text, or ignore the column")
        asks = turns([{"role": "system", "content": system}], row.said, name, images)
        first = whole[0]
        if first["role"] not in ("system", "developer"):
            whole, begin = [*asks, *whole], begin + 1
        elif first["content"] != asks[0]["content"]:
            problem = f"column {name!r} and the {first['role']} turn say different things"
            raise BadRow(problem, f"keep one of them; to ignore the column: columns: {{ignore: {name}}}")
    whole = images.finish(whole) if images else whole
    check_order(whole)
    if templates.last_turn_only:
        begin = max(begin, behind_last_question(whole))
        if not any(turn["role"] == "assistant" for turn in whole[begin:]):
            raise BadRow("no assistant's turn follows the last user's, and train_on_last_turn_only is true", NO_ANSWER)
    tools = tool_definitions(row.get("tools"), row.get("functions"))
    if holds_null(tools):
        row.said.add("null in definitions of tools, shown to the model as null")
    answers = list(wanted(whole, begin))
    text = templates.render(Chat(whole, tools, _variables(row)), answers, images.whole if images else ())
    if all(answers):
        return text
    if len(text.spans) != len(answers):
        problem = f"the chat template marks {len(text.spans)} parts of {len(answers)} assistant turns"
        raise BadRow(f"{problem}, and not all are to be supervised", "use a template that marks each turn once")
    return replace(text, spans=[span for span, learned in zip(text.spans, answers, strict=True) if learned])


def _variables(row: Row) -> Variables:
    """Return what a row hands to its chat template besides the chat: {"enable_thinking": false}."""
    name = row.name("chat_template_kwargs")
    given = from_any_text(row.get("chat_template_kwargs") or {}, name)
    if not isinstance(given, dict):
        raise BadRow(
            f"column {name!r} is {shown(given)}, not an object of variables", 'write {"enable_thinking": false}'
        )
    own = [key for key in given if key in OURS]
    if own:
        raise BadRow(f"column {name!r} sets {own[0]}", "remove it there: the run decides it")
    return {key: value for key, value in given.items() if value is not None}
