"""An answer, token by token: shown while it is generated, and kept as text."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..train.data.images import ImageSource

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # how the first bytes of a letter are decoded whose last ones have not come


class Streamer:
    """Takes tokens as Transformers' generate() hands them over, and shows their text at once.

    opening: what stands before an answer's own text (Conversation.opening), and is not shown where an answer begins with it
    ends: ids of the tokens that end an answer
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", ends: set[int], opening: str, show: Callable[[str], object]
    ) -> None:
        self._tokenizer, self._ends, self._opening, self._show = tokenizer, ends, opening, show
        self._ids: list[int] = []
        self._shown = 0  # letters
        self._began = self.ended = False

    def put(self, tokens: "torch.Tensor") -> None:
        """Take the prompt, which comes first, and then each new token."""
        if not self._began:
            self._began = True
            return
        for token in tokens.reshape(-1).tolist():
            self.ended = self.ended or token in self._ends
            if not self.ended:
                self._ids.append(token)
        self._pass_on(self._decoded())

    def end(self) -> None:
        """Show what was held back."""
        self._pass_on(self._decoded(), last=True)

    def text(self) -> str:
        """The answer, with the special tokens in it; the opening and what came before it are left out."""
        return self._decoded().rpartition(self._opening)[2] if self._opening else self._decoded()

    @property
    def count(self) -> int:
        """How many tokens the answer has."""
        return len(self._ids)

    def _decoded(self) -> str:
        # All of them each time: of a part, some tokenizers drop the blank that it begins with.
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)

    def _pass_on(self, text: str, last: bool = False) -> None:
        begins = len(text) < len(self._opening) and self._opening.startswith(text)  # it may become the opening
        if not last and (begins or text.endswith(UNFINISHED)):
            return
        if self._opening and not self._shown and text.startswith(self._opening):
            self._shown = len(self._opening)
        new = text[self._shown :]
        if new:
            self._shown = len(text)
            self._show(new)


@dataclass(frozen=True)
class Answer:
    """What a model said. stopped: by Ctrl-C; cut: it had not ended when the tokens that it may have were used up"""

    text: str
    stopped: bool
    cut: bool


@dataclass(frozen=True)
class Answering:
    """How models answer.

    ends: ids of the tokens that end an answer; temperature: 0: always the most probable token
    stoppable: whether Ctrl-C ends an answer, and not the command; processor: of images, where the model was trained on some
    """

    tokenizer: Any
    ends: set[int]
    device: str
    max_new_tokens: int
    temperature: float = 0.0
    opening: str = ""
    stoppable: bool = False
    processor: Any = None

    def answer(
        self,
        model: "PreTrainedModel",
        prompt: Sequence[int],
        positions: int,
        show: Callable[[str], object],
        images: Sequence[ImageSource] = (),
    ) -> Answer:
        """Generate what follows the prompt's token ids, and `show` it in pieces of text as it comes. images: of the prompt"""
        import torch

        from ..train.data.collate import on_device

        streamer = Streamer(self.tokenizer, self.ends, self.opening, show)
        tokens = torch.tensor([list(prompt)], device=self.device)
        more = on_device(self.processor.of_prompts(tokens.cpu(), images), torch.device(self.device)) if images else {}
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        stopped, caught = True, (KeyboardInterrupt,) if self.stoppable else ()
        with torch.inference_mode(), suppress(*caught):
            model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=min(self.max_new_tokens, positions - len(prompt)),
                num_beams=1,
                eos_token_id=sorted(self.ends) or None,
                pad_token_id=self.tokenizer.pad_token_id,
                streamer=streamer,
                **sampling,
                **more,
            )
            stopped = False
        return Answer(streamer.text(), stopped, not stopped and not streamer.ended)
