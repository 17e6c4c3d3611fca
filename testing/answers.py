"""Answers that another engine gave, next to what Transformers computes in fp32 for the same tokens."""

from dataclasses import dataclass, field
from typing import Any

import torch

Place = list[
    tuple[int, float]
]  # the likeliest tokens at one place of an answer, each with its log-probability; the taken one first


def after(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return a model's log-probabilities of all tokens at each place of an answer to a prompt, [places, tokens]."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


@dataclass
class Comparison:
    """What the answers of an engine have in common with a model's own, gathered answer by answer.

    same: answers whose every token is the model's first choice
    behind: how much less likely (log-probability) than its first choice the model holds a token that the engine took; the most
    """

    model: Any
    same: int = 0
    behind: float = 0.0
    differences: list[float] = field(default_factory=list)

    def add(self, prompt: list[int], places: list[Place]) -> None:
        """Compare one answer with what the model would say after the same prompt and the same tokens."""
        taken = [place[0][0] for place in places]
        ours = after(self.model, prompt, taken)
        self.differences += [
            float(row[token]) - value for row, place in zip(ours, places, strict=True) for token, value in place
        ]
        self.same += ours.argmax(-1).tolist() == taken
        self.behind = max(self.behind, float((ours.max(-1).values - ours[range(len(taken)), taken]).max()))

    @property
    def most(self) -> float:
        """The greatest difference of a log-probability."""
        return max(map(abs, self.differences))

    @property
    def root_mean_square(self) -> float:
        """The root of the mean square of all differences."""
        return float(torch.tensor(self.differences).square().mean().sqrt())
