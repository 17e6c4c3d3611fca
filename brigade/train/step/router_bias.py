"""Balance of a mixture's experts without a loss: after each step, the bias by which routers choose follows the step's tokens.

The rule is that of Wang et al. 2024 (arXiv 2408.15664, algorithm 1) and DeepSeek-V3 (arXiv 2412.19437, 2.1.2): of each layer

    bias += rate x sign(mean of the experts' tokens - an expert's tokens)

The bias is added to scores only to choose by them, has no gradient, and no optimizer knows it. Tokens are those of the whole
step: of all micro-batches and ranks, without padding and filler. They are counted in integers, so that ranks and accumulation
change no bias. Where some ranks compute with the same tokens, one of them counts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import distributed

from ...errors import UserError
from ..data.collate import REAL, Inputs
from ..run.hooks import Feature
from ..upstream.experts import computes_gradients, routing_biases
from .context import TrainingContext


class RouterBias(Feature):
    """Updates routing biases by `rate`. Make it before an engine wraps the model: the biases are buffers in fp32 from then on.

    counts: False on ranks that compute with another rank's tokens
    """

    def __init__(self, trainer: TrainingContext, rate: float, counts: bool = True) -> None:
        self.trainer, self.rate, self.counts = trainer, rate, counts
        self.biases = routing_biases(trainer.model)
        sizes = [bias.tensor.numel() for bias in self.biases]
        # Of the step so far, of all layers in one tensor: (experts of the first layer + ...)
        self.tokens = torch.zeros(sum(sizes), dtype=torch.long, device=trainer.args.device)
        self.of_layers = self.tokens.split(sizes)
        # Of this micro-batch: (tokens), 0 for filler and padding; None between micro-batches, where others may count.
        self.real: torch.Tensor | None = None
        for layer, bias in enumerate(self.biases):
            bias.become_buffer()
            bias.experts.register_forward_pre_hook(partial(self._count, layer))

    def begin(self, checkpoint: Path | None) -> None:
        """Raise UserError where a wrapper has cast the biases: 0.1 + 0.0001 is 0.1 in bf16."""
        if any(bias.tensor.dtype != torch.float32 for bias in self.biases):
            place = self.trainer.run.strategy.source
            raise UserError(
                place, "routing biases are updated in fp32, and it casts them", "remove data_types.buffer_dtype"
            )

    def before_step(self) -> None:
        self.tokens.zero_()

    def before_micro_batch(self, inputs: Inputs) -> None:
        self.real = inputs[REAL].reshape(-1).long() * self.counts

    def after_micro_batch(self, loss: torch.Tensor) -> None:
        self.real = None

    @torch.no_grad()
    def on_optimizer_step(self, args: object, state: object, control: object, **_: object) -> None:
        """Update all biases, unless the step was left out. A collective, for which the host does not wait."""
        if self.trainer.nonfinite.dropped or self.trainer.accelerator.optimizer_step_was_skipped:
            return
        if distributed.is_initialized():
            distributed.all_reduce(self.tokens)
        for bias, tokens in zip(self.biases, self.of_layers, strict=True):
            missing = tokens.sum() - len(tokens) * tokens  # mean - tokens, times the experts: whole numbers
            bias.tensor.view(-1).add_(missing.sign(), alpha=self.rate)

    def _count(self, layer: int, module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        """Count a layer's pass over each micro-batch of training, but not when it is computed again for its gradients: in a
        pipeline that may be after other micro-batches."""
        if self.real is None or not module.training or computes_gradients():
            return
        chosen = given[1].long()  # of each token its experts: (tokens, top_k)
        self.of_layers[layer].scatter_add_(0, chosen.flatten(), self.real.repeat_interleave(chosen.shape[-1]))
