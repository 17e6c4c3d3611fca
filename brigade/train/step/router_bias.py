"""Balance of a mixture's experts without a loss: after each step, the bias by which routers choose follows the step's tokens.

The rule is that of Wang et al. 2024 (arXiv 2408.15664, algorithm 1) and DeepSeek-V3 (arXiv 2412.19437, 2.1.2): of each layer

    bias += rate x sign(mean of the experts' tokens - an expert's tokens)

The bias is added to scores only to choose by them, has no gradient, and no optimizer knows it. Tokens are those of the whole
step: of all micro-batches and ranks, without padding and filler. They are counted in integers, so that ranks and accumulation
change no bias. Where some ranks compute with the same tokens, one of them counts.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed

from ...errors import UserError
from ..upstream.experts import routing_biases
from .context import TrainingContext
from .expert_tokens import ExpertTokens


class RouterBias(ExpertTokens):
    """Updates routing biases by `rate`. Make it before an engine wraps the model: the biases are buffers in fp32 from then on.

    counts: False on ranks that compute with another rank's tokens
    """

    def __init__(self, trainer: TrainingContext, rate: float, counts: bool = True) -> None:
        self.trainer, self.rate, self.counts = trainer, rate, counts
        self.biases = routing_biases(trainer.model)
        super().__init__(dict(enumerate(bias.tensor.numel() for bias in self.biases)), trainer.args.device)
        for layer, bias in enumerate(self.biases):
            bias.become_buffer()
            self.watch(layer, bias.experts)

    def begin(self, checkpoint: Path | None) -> None:
        """Raise UserError where a wrapper has cast the biases: 0.1 + 0.0001 is 0.1 in bf16."""
        if any(bias.tensor.dtype != torch.float32 for bias in self.biases):
            place = self.trainer.run.strategy.source
            raise UserError(
                place, "routing biases are updated in fp32, and it casts them", "remove data_types.buffer_dtype"
            )

    def before_step(self) -> None:
        self.tokens.zero_()

    @torch.no_grad()
    def on_optimizer_step(self, args: object, state: object, control: object, **_: object) -> None:
        """Update all biases, unless the step was left out. A collective, for which the host does not wait."""
        if self.trainer.nonfinite.dropped or self.trainer.accelerator.optimizer_step_was_skipped:
            return
        self.tokens *= self.counts
        if distributed.is_initialized():
            distributed.all_reduce(self.tokens)
        for bias, tokens in zip(self.biases, self.of_layers.values(), strict=True):
            missing = tokens.sum() - len(tokens) * tokens  # mean - tokens, times the experts: whole numbers
            bias.tensor.view(-1).add_(missing.sign(), alpha=self.rate)
