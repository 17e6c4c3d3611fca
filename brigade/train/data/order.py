"""The order of a chat's turns: which may follow which, what stands behind the last question, and which answers are learned."""

from collections.abc import Iterable

from ...errors.tables import Fields
from .rows import BadRow, Message
from .tool_calls import behind_its_call

MAY_FOLLOW = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
NO_ANSWER = "add the answer, or drop the row"


def check_order(messages: list[Message]) -> None:
    """Raise BadRow for turns that do not alternate, results in another order than their calls, and a chat without an answer."""
    before, asked, begin = "", list[Fields](), 0
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role in ("system", "developer"):
            if number > 1:
                raise BadRow(f"message {number} is a {role} turn", "a system turn can only be the first")
            continue
        if role not in MAY_FOLLOW.get(before, ("user", "assistant")):
            then, start = " or ".join(MAY_FOLLOW.get(before, ("user",))), before or "the start"
            problem = f"roles do not alternate: message {number} is {role!r} after {start!r}"
            raise BadRow(problem, f"after {start} comes {then}: join or drop turns")
        before = role
        if role == "assistant":
            asked, begin = message.get("tool_calls", []), 0
        elif role == "tool" and len(asked) > 1:
            begin = behind_its_call(message, number, asked, begin)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("a dialogue without an assistant turn, so nothing is supervised", NO_ANSWER)


def behind_last_question(messages: list[Message]) -> int:
    """Return the number of the turn after the user's last one; 0 where there is none."""
    return 1 + max((number for number, turn in enumerate(messages) if turn["role"] == "user"), default=-1)


def wanted(messages: list[Message], begin: int) -> Iterable[bool]:
    """Yield for each of the assistant's turns whether it is learned: from message `begin` on, unless a flag says otherwise."""
    for number, turn in enumerate(messages):
        if turn["role"] == "assistant":
            yield number >= begin and turn.get("train", True)
