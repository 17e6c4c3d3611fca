"""A conversation: what was said so far, as the token ids that the model reads. Its oldest turns go where they no longer fit."""

from collections.abc import Sequence

from ..errors import UserError
from ..errors.tables import Fields
from ..train.data.encode import LoadedEncoder
from ..train.data.images import MARK, ImageSource
from ..train.data.rows import BadRow, Chat

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
        self.turns: list[tuple[str, str, tuple[ImageSource, ...]]] = []  # questions, their answers and images

    def prompt(self, question: str, images: Sequence[ImageSource] = ()) -> tuple[list[int], int]:
        """Return the token ids to be continued, and how many of the oldest turns were dropped so that an answer has its room.

        images: stand before the question; images() then returns those of the whole prompt
        Raises UserError where the question by itself leaves no position for an answer, and where the template refuses it.
        """
        dropped = 0
        while len(ids := self._ids(question, images)) > self.positions - self.room and self.turns:
            del self.turns[0]
            dropped += 1
        if len(ids) >= self.positions:
            problem = f"it makes {len(ids):,} tokens, and the model has positions for {self.positions:,}"
            raise UserError("the question", problem, "ask a shorter one (or give a shorter --system)")
        return ids, dropped

    def images(self, own: Sequence[ImageSource] = ()) -> list[ImageSource]:
        """Return the images of all turns, and behind them those of the next question."""
        return [image for *_, images in self.turns for image in images] + list(own)

    def add(self, question: str, answer: str, images: Sequence[ImageSource] = ()) -> None:
        """Take in a turn, which the next prompt will hold. An answer without a letter is no turn."""
        if self.has_turns and answer.strip():
            self.turns.append((question, answer, tuple(images)))

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

    def _messages(self) -> list[Fields]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer, images in self.turns:
            messages += [_asked(question, images), {"role": "assistant", "content": answer}]
        return messages

    def _ids(self, question: str, images: Sequence[ImageSource]) -> list[int]:
        if not self.has_turns:
            return self.encoder.beginning(question)
        try:
            return self.encoder.prompt([*self._messages(), _asked(question, images)], self.images(images))
        except BadRow as error:
            raise _refused(error, "leave the image out, or " if images else "") from None

    def _rendered(self, messages: list[Fields], variables: Fields) -> str:
        try:
            return self.encoder.chats.render(Chat(messages, variables=variables), images=self.images()).text
        except BadRow as error:
            raise _refused(error) from None


def _asked(question: str, images: Sequence[ImageSource]) -> Fields:
    return {"role": "user", "content": MARK * len(images) + question}


def _refused(error: BadRow, other_cure: str = "") -> UserError:
    """The error for a chat that the template refuses: most of those that do, refuse a system message."""
    cure = f"{other_cure}leave --system out where the template takes no system message"
    return UserError("the conversation", str(error.args[0]), cure)
