"""A row of preferences as texts: a better and a worse answer to one prompt, or answers that are labelled good or bad.

However a row spells a pair, it becomes a prompt of messages and what each answer adds to it. Texts that are joined for want of a
chat template stay as they are.
"""

from dataclasses import replace

from ...errors import shown
from ...errors.tables import Fields
from ..recipe.objectives import PAIRS
from . import verdicts
from .keys import Columns, Row, blank, says_nothing
from .messages import THOUGHTS, turns, turns_from_text
from .order import NO_ANSWER, behind_last_question
from .rendered import repeats, transcript
from .rows import BadRow, Chat, Message
from .samples import Templates, Text, chat, exchange, kind_of, pair, question, usual, with_unread
from .thinking import thoughts

# A worse answer's column -> those in which the better one stands beside it. TRL's, and LLaMA-Factory's in its first form;
# LLaMA-Factory's in its second, and ms-swift's; ms-swift's, whose messages end with the better answer; OpenAI's.
BETTER = {
    "rejected": ("chosen",),
    "rejected_messages": ("chosen_messages", "messages"),
    "rejected_response": ("completion", "messages"),
    "non_preferred_output": ("preferred_output",),
}
PROMPTS = ("prompt", "messages")
WRITE_A_PAIR = (
    'write {"prompt": ..., "chosen": ..., "rejected": ...}, or name yours: columns: {chosen: ..., rejected: ...}'
)
SAME = "chosen and rejected are the same, so neither is the better answer"
DROP = "drop the row"


def convert(content: object, columns: Columns, templates: Templates, rows: str) -> tuple[Text, ...]:
    """Return the answers of a row, each after its prompt and the only supervised part of its text: the better and the
    worse one (PAIRS); the one that is labelled, or both of a pair (JUDGED). Raises BadRow."""
    if not isinstance(content, dict):
        raise BadRow(f"not an object of columns: {repr(content)[:60]}", WRITE_A_PAIR)
    row = Row(_flat(content), columns, rows)
    is_pair = rows == PAIRS or any(row.has(key) and not says_nothing(row.content[row.name(key)]) for key in BETTER)
    texts = _pair(row, templates) if is_pair else (_judged(row, templates),)
    row.refuse_leftover()
    return with_unread(row, *texts), *texts[1:]


def _flat(content: Fields) -> Fields:
    """Return a row with the messages and tools that OpenAI's rows hold in `input`."""
    given = content.get("input")
    if "preferred_output" not in content or not isinstance(given, dict):
        return content
    return given | {key: value for key, value in content.items() if key != "input"}


# ---- pairs -----------------------------------------------------------------------------------------------------------
def _pair(row: Row, templates: Templates) -> tuple[Text, Text]:
    """Return the better answer and the worse one of a row."""
    better, worse = _columns_of_pair(row)
    verdicts.check(row, row.name(better), row.name(worse))
    asked = row.there(key for key in PROMPTS if key != better) or "prompt"
    names = [row.name(better), row.name(worse)]
    prompt, *answers = (turns_from_text(row.get(key), row.name(key)) for key in (asked, better, worse))
    if asked == "messages" and not says_nothing(prompt):
        prompt = turns(prompt, row.said)
    for name, answer in zip(names, answers, strict=True):
        if answer is None or (isinstance(answer, str) and blank(answer)):
            raise _empty(name)
    if worse == "rejected_response" and better == "messages":
        whole = turns(answers[0], row.said)
        begin = behind_last_question(whole)
        prompt, answers[0] = whole[:begin], whole[begin:]
        if not answers[0]:
            raise BadRow(f"column {names[0]!r} ends with a question, and the better answer is to follow it", NO_ANSWER)
    _refuse_transcripts(names, answers, prompt)
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        _refuse_repeated(prompt, answers)
        first, second = (exchange(row, prompt, answer, templates, learns_history=False) for answer in answers)
        return first, _undesirable(second)
    ours, theirs = (_turns(row, answer, "assistant", name) for name, answer in zip(names, answers, strict=True))
    if list(map(_said, ours)) == list(map(_said, theirs)):
        raise BadRow(SAME, DROP)
    verdicts.check_turns(names, ours[-1], theirs[-1])
    before, ours, theirs = _divided(row, prompt, ours, theirs, templates)
    for name, answer in zip(names, (ours, theirs), strict=True):
        _refuse_empty(name, answer)
    _refuse_repeated(before[-1]["content"], [answer[0]["content"] for answer in (ours, theirs)])
    first, second = (chat(row, before + answer, len(before), templates) for answer in (ours, theirs))
    return first, _undesirable(second)


def _columns_of_pair(row: Row) -> tuple[str, str]:
    """Return our names of the columns with (the better answer, the worse one)."""
    worse = row.there(BETTER)
    if worse is None:
        raise _no_pair(row)
    better = row.there(BETTER[worse])
    if better is None:
        names = [row.name(key) for key in BETTER[worse]]
        problem = f"a column {row.name(worse)!r} without {' or '.join(map(repr, names))}"
        if any(name in row.content for name in names):
            problem += ", which data.columns names for something else"
        raise BadRow(problem, WRITE_A_PAIR)
    return better, worse


def _no_pair(row: Row) -> BadRow:
    """Return the error of a row without a column for the worse answer."""
    there = ", ".join(map(repr, row.content)) or "nothing"
    cure = WRITE_A_PAIR
    three = verdicts.options(row.content)
    if three:
        first, second, which = three
        cure = (
            f"write each row's better answer into a column chosen and the other into rejected, as {which!r} says; "
            f"columns: {{chosen: {first}, rejected: {second}}} with skip_bad_rows: true keeps the rows where {first!r} is better"
        )
    return BadRow(f"no better and worse answer here, only {there}", cure)


def _turns(row: Row, value: object, role: str, called: str) -> list[Message]:
    """Return a text, a message or a list of messages as turns. role: of the turn that a text becomes; called: the column"""
    value = {"role": role, "content": value} if isinstance(value, str) else value
    return turns([value] if isinstance(value, dict) else value, row.said, called)


def _divided(
    row: Row, prompt: object, better: list[Message], worse: list[Message], templates: Templates
) -> tuple[list[Message], list[Message], list[Message]]:
    """Return the prompt's turns, and those of each answer after it.

    The answers are whole chats, whose beginning in common is the prompt (it has to begin with `prompt` where a row has one,
    too), or begin with the assistant's turn.
    """
    are_whole = {answer[0]["role"] != "assistant" for answer in (better, worse)}
    if len(are_whole) > 1:
        problem = "one of chosen and rejected is a whole chat, and the other begins with the assistant's turn"
        raise BadRow(problem, "write both alike")
    if not are_whole.pop():
        if says_nothing(prompt):
            name = usual(row, "prompt") or usual(row, "messages") or "NAME"
            problem = "chosen and rejected are answers, and no column says what was asked"
            raise BadRow(problem, f"give a prompt or messages, or name yours: columns: {{prompt: {name}}}")
        asked = question(row, prompt) if isinstance(prompt, str) else prompt
        return _turns(row, asked, "user", "prompt"), better, worse
    turns_of_both = zip(better, worse, strict=False)
    shorter = min(len(better), len(worse))
    same = next((n for n, (ours, theirs) in enumerate(turns_of_both) if _said(ours) != _said(theirs)), shorter)
    before = better[:same]
    if not before or before[-1]["role"] not in ("user", "tool"):
        where = f"ends with message {same}, whose role is {before[-1]['role']!r}" if before else "is empty"
        problem = f"the beginning that chosen and rejected have in common {where}, so it is no prompt that both answer"
        raise BadRow(problem, "let both chats begin with the same turns, the last of them the user's; or drop the row")
    _refuse_unlike(before, worse[:same], templates)
    if says_nothing(prompt):
        return before, better[same:], worse[same:]
    asked_first = next((turn["content"] for turn in before if turn["role"] == "user"), "")
    if isinstance(prompt, str):
        begins = asked_first.strip() == question(row, prompt).strip()
    else:
        given = _turns(row, prompt, "user", "prompt")
        begins = list(map(_said, before[: len(given)])) == list(map(_said, given))
    if not begins:
        problem = "the chats chosen and rejected do not begin with the row's prompt"
        raise BadRow(problem, "fix it, or leave it out on purpose: columns: {ignore: [prompt, messages]}")
    return before, better[same:], worse[same:]


def _refuse_transcripts(names: list[str], answers: list[object], prompt: object) -> None:
    """Raise BadRow for answers that are whole chats in one text, as HH-RLHF's are, and no dialogues that a prompt asks for."""
    texts = [answer for answer in answers if isinstance(answer, str)]
    signs = [sign for sign in map(transcript, texts) if sign]
    if len(signs) < len(answers):
        return
    repeated = isinstance(prompt, str) and all(prompt.strip() in text for text in texts)
    if not (says_nothing(prompt) or repeated or all(sign.sure for sign in signs)):
        return
    problem = f"{' and '.join(map(repr, names))} are whole chats in one text, which begins with {signs[0].mark!r}"
    cure = (
        'write each as turns: [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]; or, with '
        "chat_template: none, give all up to the mark of the last answer as prompt, and the two answers behind it"
    )
    raise BadRow(problem, cure)


def _refuse_repeated(prompt: str, answers: list[str]) -> None:
    if repeats(prompt, answers):
        problem = "both answers begin with the prompt's own text, which would stand there twice"
        raise BadRow(problem, "write the answers without it")


def _said(turn: Message) -> Message:
    """Return what a turn says: without ids and further keys, which differ where the turn is the same."""
    said = {key: turn.get(key) for key in ("role", "content", "train", *THOUGHTS)}
    return said | {"calls": [call["function"] for call in turn.get("tool_calls", ())]}


def _refuse_unlike(ours: list[Message], theirs: list[Message], templates: Templates) -> None:
    """Raise BadRow for prompts that say the same, but whose further keys the chat template writes differently."""
    if ours == theirs or templates.render(Chat(ours)).text == templates.render(Chat(theirs)).text:
        return
    pairs = zip(ours, theirs, strict=True)
    keys = sorted({key for a, b in pairs for key in a.keys() | b.keys() if a.get(key) != b.get(key)})
    problem = (
        f"the turns with which chosen and rejected begin differ in {', '.join(keys)}, which the chat template writes"
    )
    raise BadRow(problem, "write both alike, or remove the key")


def _undesirable(text: Text) -> Text:
    return replace(text, desirable=False)


def _refuse_empty(name: str, answer: list[Message]) -> None:
    """Raise BadRow for turns of which none is an assistant's that says, calls or thinks something."""
    own = (turn for turn in answer if turn["role"] == "assistant")
    if not any(not blank(turn["content"]) or turn.get("tool_calls") or any(thoughts(turn)) for turn in own):
        raise _empty(name)


def _empty(name: str) -> BadRow:
    return BadRow(f"the answer in column {name!r} is empty, so nothing is supervised", NO_ANSWER)


# ---- judged answers --------------------------------------------------------------------------------------------------
def _judged(row: Row, templates: Templates) -> Text:
    """Return the answer of a row that is labelled good or bad: its completion, or what follows the last user's turn of its
    messages."""
    kind = kind_of(row)
    if kind == "text":
        problem = "a text answers nothing, so it is neither a good nor a bad answer"
        raise BadRow(
            problem, 'write {"prompt": ..., "completion": ..., "label": true}, or {"messages": [...], "label": true}'
        )
    desirable = _label(row)
    if kind == "messages":
        whole = turns(row.get("messages"), row.said)
        begin = behind_last_question(whole)
        _refuse_empty(row.name("messages"), whole[begin:])
        text = chat(row, whole, begin, templates)
    else:
        completion = row.get("completion")
        if completion is not None:
            name = row.name("completion")
            _refuse_empty(name, _turns(row, turns_from_text(completion, name), "assistant", name))
        text = pair(row, templates, learns_history=False)
    return text if desirable else _undesirable(text)


def _label(row: Row) -> bool:
    """Return whether an answer is labelled good."""
    key = row.there(("label", "kto_tag"))
    value = row.get(key) if key else None
    if key is None or value is None:
        name, there = row.name(key or "label"), ", ".join(map(repr, row.content))
        missing = f"column {name!r} holds nothing" if key else f"no column {name!r}, only {there}"
        cure = "give each row label: true or false, or name yours: columns: {label: ...}"
        raise BadRow(f"nothing says whether the answer is a good one: {missing}", cure)
    desirable = verdicts.LABELS.get(str(value).strip().lower()) if isinstance(value, (bool, int, float, str)) else None
    if desirable is None:
        raise BadRow(f"column {row.name(key)!r} is {shown(value)}, neither true nor false", "write true or false")
    return desirable
