"""A conversation: what was said so far, as the token ids that the model reads. Its oldest turns go where they no longer fit."""

from typing import Any

from ..errors import UserError
from ..train.data.encode import LoadedEncoder
from ..train.data.rows import BadRow

NAME = "X"  # an answer, to see what the template writes before it


class Conversation:
    """The turns of one model. Without a chat template there are none: each text is continued by itself.

    encoder: the run's own, so that a question is tokenised as a sample is
    positions: how many tokens the model has positions for
    room: how many of them an answer may need
    system: text of the first message; "": there is none
    """

    def __init__(self, encoder: LoadedEncoder, positions: int, room: int, system: str = "") -> None:
        self.encoder, self.positions, self.system = encoder, positions, system
        self.has_turns = encoder.encoder.templates.error(None) is None
        self.room = max(1, min(room, positions // 2))
        self.turns: list[tuple[str, str]] = []  # questions and their answers

    def prompt(self, question: str) -> tuple[list[int], int]:
        """Return the token ids to be continued, and how many of the oldest turns were dropped so that an answer has its room.

        Raises UserError where the question by itself leaves no position for an answer, and where the template refuses it.
        """
        dropped = 0
        while len(ids := self._ids(question)) > self.positions - self.room and self.turns:
            del self.turns[0]
            dropped += 1
        if len(ids) >= self.positions:
            problem = f"it makes {len(ids):,} tokens, and the model has positions for {self.positions:,}"
            raise UserError("the question", problem, "ask a shorter one (or give a shorter --system)")
        return ids, dropped

    def add(self, question: str, answer: str) -> None:
        """Take in a turn, which the next prompt will hold. An answer without a letter is no turn."""
        if self.has_turns and answer.strip():
            self.turns.append((question, answer))

    def forget(self) -> None:
        """Begin anew."""
        self.turns.clear()

    def opening(self) -> str:
        """Return what the template writes before an answer's own text, and so the model does: <|channel|>final<|message|> in
        gpt-oss, an empty block of thoughts in Qwen 3. Mostly nothing."""
        if not self.has_turns:
            return ""
        asked = [*self._messages(), {"role": "user", "content": NAME}]
        before = self._rendered(asked, {"add_generation_prompt": True})
        after = self._rendered([*asked, {"role": "assistant", "content": NAME}], {})
        return after[len(before) :].partition(NAME)[0] if after.startswith(before) else ""

    def _messages(self) -> list[dict[str, Any]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in self.turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return messages

    def _ids(self, question: str) -> list[int]:
        if not self.has_turns:
            return self.encoder.beginning(question)
        try:
            return self.encoder.prompt([*self._messages(), {"role": "user", "content": question}])
        except BadRow as error:
            raise _refused(error) from None

    def _rendered(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        try:
            return self.encoder.chats.render(messages, None, variables).text
        except BadRow as error:
            raise _refused(error) from None


def _refused(error: BadRow) -> UserError:
    """The error for a chat that the template refuses: most of those that do, refuse a system message."""
    return UserError(
        "the conversation", str(error.args[0]), "leave --system out where the template takes no system message"
    )
