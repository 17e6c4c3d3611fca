"""The loss that teaches a mixture's routers to use all experts, over all tokens of a step.

It is that of Switch Transformers (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6), as Transformers takes it over layers
(load_balancing_loss_func): E times the sum over experts of F P, where E is the number of experts, F the share of tokens that
choose an expert, and P the mean of its probability, both over all layers and tokens. Transformers takes both means over a
micro-batch, so that accumulation, ranks and packing change the loss. Here they are over the step: a micro-batch adds

    E x sum over experts of (F of the step x sum over the micro-batch's tokens of the probability) / tokens of the step

on each rank. F has no gradient. It is known once all tokens of the step have passed their routers, so that a step of several
micro-batches begins with a forward pass over each of them that only counts.
"""

from functools import partial

import torch
from torch import distributed

from ..data.collate import REAL, Inputs
from ..data.store import MicroBatch
from ..distributed import heartbeat
from ..distributed.process import this_process
from ..engines.engine import StepContext
from ..run.hooks import Feature
from ..upstream.experts import routers


class RouterLoss(Feature):
    """Adds `coefficient` times the routers' loss to each micro-batch's.

    copies: ranks that compute with the same tokens (a tensor group)
    """

    def __init__(self, trainer: StepContext, coefficient: float, copies: int) -> None:
        self.trainer, self.coefficient, self.copies = trainer, coefficient, copies
        self.top_k = trainer.model.config.get_text_config().num_experts_per_tok
        # of this micro-batch: (tokens), 0 for filler and padding; None: not in training
        self.real: torch.Tensor | None = None
        self.logits: list[torch.Tensor] = []  # of each layer: (tokens, experts)
        self.weights: torch.Tensor | None = None  # of this step's probabilities: (experts)
        self.ahead: list[MicroBatch] = []  # of this step, which are yet to be counted
        self.sum, self.steps = torch.zeros((), device=trainer.args.device), 0
        self.before = self.sum, self.steps  # of the step that is computed
        for module, index in routers(trainer.model):
            module.register_forward_hook(partial(self._record, index))

    def before_micro_batches(self, micro_batches: list[MicroBatch]) -> None:
        self.before = self.sum.clone(), self.steps
        self.weights, self.steps = None, self.steps + 1
        self.ahead = micro_batches if len(micro_batches) > 1 else []  # of a single one its own forward pass counts

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        """By now a run that goes on has the random numbers of its checkpoint, or others (OtherRanks)."""
        if self.ahead:
            this_process.heartbeat.enter(heartbeat.FORWARD)
            self.weights, self.ahead = self._weights(self._counts_ahead(self.ahead)), []

    def before_micro_batch(self, inputs: Inputs) -> None:
        self.real, self.logits = inputs[REAL].reshape(-1).float(), []

    def term(self) -> torch.Tensor:
        """Return this micro-batch's part of the step's loss, a scalar in fp32, once its forward pass is over. The first one of a
        step that has no other is a collective."""
        if self.weights is None:
            self.weights = self._weights(self._counts())
        term = sum((self.weights * self._probabilities(layer)).sum() for layer in self.logits)
        self.real, self.logits = None, []
        self.sum += term.detach()  # type: ignore[union-attr]
        return self.coefficient * term  # type: ignore[return-value]

    def forget_step(self) -> None:
        self.sum, self.steps = self.before

    def add_figures(self, logs: dict[str, float], step: int) -> None:
        """aux_loss: the routers' loss, mean over steps since the last entry; where all experts are used alike, it is top_k"""
        if distributed.is_initialized():
            distributed.all_reduce(self.sum)
        logs["aux_loss"] = float(self.sum) / self.copies / max(1, self.steps)
        self.sum, self.steps = torch.zeros_like(self.sum), 0

    def _record(
        self, index: int, module: torch.nn.Module, given: object, output: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> None:
        """Recomputed layers (activation checkpointing) come after term(), and evaluations without before_micro_batch()."""
        if self.real is not None:
            self.logits.append(output[index] if isinstance(output, tuple) else output)

    def _probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the sums over this micro-batch's tokens: (experts)"""
        return (_probability(logits) * self.real.unsqueeze(-1)).sum(0)  # type: ignore[union-attr]

    def _counts(self) -> torch.Tensor:
        """Return how many tokens of this micro-batch chose each expert, over all layers, and at the end how many chose:
        (experts + 1) in float64"""
        real = self.real.double()  # type: ignore[union-attr]
        counts = torch.zeros(self.logits[0].shape[-1] + 1, dtype=torch.float64, device=real.device)
        for logits in self.logits:
            chosen = _probability(logits.detach()).topk(self.top_k, dim=-1).indices
            counts.scatter_add_(0, chosen.flatten(), real.repeat_interleave(self.top_k))
        counts[-1] = real.sum() * len(self.logits)
        return counts

    def _counts_ahead(self, micro_batches: list[MicroBatch]) -> torch.Tensor:
        """Return the counts of micro-batches that are yet to be computed. They draw the same dropout then."""
        trainer, counts = self.trainer, []
        device = trainer.args.device
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for inputs in micro_batches:
                self.before_micro_batch(inputs)
                with trainer.compute_loss_context_manager():
                    trainer.outputs(trainer.model_wrapped, inputs, 1)
                counts.append(self._counts())
        self.real, self.logits = None, []
        torch.clear_autocast_cache()  # its copies of the weights have no gradient
        return torch.stack(counts).sum(0)

    def _weights(self, counts: torch.Tensor) -> torch.Tensor:
        """Return what a token's probability of each expert adds to the step's loss: (experts). A collective."""
        if distributed.is_initialized():
            distributed.all_reduce(counts)
        of_all = counts[-1]
        return ((len(counts) - 1) * counts[:-1] / of_all / (of_all / self.copies)).float()


def _probability(logits: torch.Tensor) -> torch.Tensor:
    """Return what the loss takes for a token's probability of each expert, whatever the router itself makes of its logits:
    (tokens, experts)"""
    return logits.reshape(-1, logits.shape[-1]).float().softmax(-1)
