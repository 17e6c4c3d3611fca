"""How evenly a mixture of experts uses its experts: counted where routers hand tokens on, under every strategy.

Counts stay on the device, and ranks add them up at a log line alone. Padding does not count. Recomputed layers count twice
(activation checkpointing), which changes no share.
"""

import json
from functools import partial
from typing import Any

import torch
from torch import distributed

from ..run.directory import Run
from ..upstream import are_experts

FILE = "expert_load.json"


class ExpertBalance:
    """Counts tokens of each expert between two calls of `report`, in training alone.

    counts: False on ranks that compute with another rank's tokens
    """

    def __init__(self, run: Run, model: Any, counts: bool = True) -> None:
        found = {name: module for name, module in model.named_modules() if are_experts(module)}
        self.run, self.names, self.counts = run, list(found), counts
        self.tokens: list[Any] = [None] * len(found)  # of each layer: (experts)
        self.mask: Any = None  # of this micro-batch: (rows, tokens), 0 for padding; None where there is none
        for number, module in enumerate(found.values()):
            module.register_forward_pre_hook(partial(self._count, number, module.num_experts))

    def _count(self, number: int, experts: int, module: Any, args: tuple[Any, ...]) -> None:
        if not module.training:
            return
        chosen = args[1].long()  # of each token its experts: (tokens, top_k)
        if self.tokens[number] is None:
            self.tokens[number] = chosen.new_zeros(experts)
        counted = torch.ones_like(chosen)
        if self.mask is not None and self.mask.numel() == len(chosen):
            counted *= self.mask.reshape(-1, 1)
        self.tokens[number].scatter_add_(0, chosen.flatten(), counted.flatten())

    def report(self, step: int) -> dict[str, float]:
        """Figures since the last report, over all ranks, and the same by layer and expert in expert_load.json. A collective.

        expert_balance: tokens of a layer's busiest expert / tokens of its mean one, mean over layers: 1 where all get the same
        busiest_expert: percent of its layer's tokens that the busiest expert of all layers got
        idle_experts: percent of all experts, those that got none
        """
        tokens = torch.stack(self.tokens) if None not in self.tokens else None
        self.tokens = [None] * len(self.names)
        if tokens is None:
            return {}
        tokens *= self.counts
        if distributed.is_initialized():
            distributed.all_reduce(tokens)
        shares = (tokens / tokens.sum(1, keepdim=True).clamp(min=1)).double().cpu()
        if self.run.world.is_main_rank:
            rounded = [[round(share, 6) for share in layer] for layer in shares.tolist()]
            text = json.dumps({"step": step, "shares": dict(zip(self.names, rounded, strict=True))})
            temporary = self.run.directory / f".{FILE}"
            temporary.write_text(text + "\n")
            temporary.replace(self.run.directory / FILE)
        return {
            "expert_balance": float(shares.amax(1).mean()) * shares.shape[1],
            "busiest_expert": 100 * float(shares.max()),
            "idle_experts": 100 * float((shares == 0).double().mean()),
        }
