"""Noise on the embeddings while training (NEFTune, Jain et al. 2023, arXiv 2310.05914)."""

from __future__ import annotations

import hashlib

import torch

from ..data.collate import Inputs
from ..engines.engine import StepContext
from ..run.hooks import Feature


class Neftune(Feature):
    """Adds to each token's embedding uniform noise from -1 to 1, times alpha / sqrt(L d).

    L: tokens of its own sample, however many samples share a sequence; d: the hidden size

    The noise of a micro-batch follows from the recipe's seed, the step, and which micro-batch of which data-parallel rank it is.
    So a run that continues from a checkpoint draws what it would have drawn.
    """

    def __init__(self, trainer: StepContext, alpha: float) -> None:
        self.trainer, self.alpha = trainer, alpha
        self.seed = trainer.run.settings.recipe.training.seed
        self.generator = torch.Generator(device=trainer.args.device)
        self.micro_batch = 0
        self.lengths: torch.Tensor | None = None  # of each token's sample: as input_ids; None: not in training
        trainer.model.get_input_embeddings().register_forward_hook(self._add)

    def before_step(self) -> None:
        self.micro_batch = 0

    def before_micro_batch(self, inputs: Inputs) -> None:
        place = (self.seed, self.trainer.state.global_step, self.micro_batch, self.trainer.data_rank)
        self.generator.manual_seed(int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:7]))
        self.micro_batch += 1
        self.lengths = sample_lengths(inputs)

    def after_micro_batch(self, loss: torch.Tensor) -> None:
        self.lengths = None

    def _add(self, module: torch.nn.Module, given: object, embeddings: torch.Tensor) -> torch.Tensor | None:
        if self.lengths is None:
            return None
        noise = torch.empty_like(embeddings).uniform_(-1, 1, generator=self.generator)
        size = self.alpha / (self.lengths * embeddings.shape[-1]).sqrt()
        return embeddings + noise * size.unsqueeze(-1).to(embeddings.dtype)


def sample_lengths(inputs: Inputs) -> torch.Tensor:
    """Return the tokens of each token's own sample: (sequences, tokens) in fp32, without waiting for the device.

    inputs: of a model, with position_ids that begin again at each sample, or an attention_mask of one sample in each sequence
    """
    ids = inputs["input_ids"]
    positions = inputs.get("position_ids")
    if positions is None:
        mask = inputs.get("attention_mask")
        lengths = torch.full(ids.shape[:1], ids.shape[1], device=ids.device) if mask is None else mask.sum(-1)
        return lengths.clamp(min=1).float().unsqueeze(-1).expand(ids.shape)
    sample = (positions == 0).flatten().cumsum(0) - 1
    counts = torch.zeros(sample.numel(), device=ids.device).index_add_(
        0, sample, torch.ones_like(sample, dtype=torch.float32)
    )
    return counts[sample].view(ids.shape)
