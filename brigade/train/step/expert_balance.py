"""How evenly a mixture of experts uses its experts: counted where routers hand tokens on, under every strategy.

Counts stay on the device, and ranks add them up only at a log line. Padding and filler do not count. Layers that are computed
again (activation checkpointing) do not count twice: in a pipeline other micro-batches may have come since.
"""

import json
from functools import partial
from typing import Any

import torch
from torch import distributed

from ..data.collate import REAL, Inputs
from ..distributed import ranks
from ..host import files
from ..run.directory import Run
from ..run.hooks import Feature
from ..upstream import are_experts
from ..upstream.experts import computes_gradients

FILE = "expert_load.json"


class ExpertBalance(Feature):
    """Counts tokens of each expert between two log entries, only in training. Making one is a collective.

    device: where collectives take tensors from; counts: False on ranks that compute with another rank's tokens
    """

    def __init__(self, run: Run, model: torch.nn.Module, device: torch.device, counts: bool = True) -> None:
        found = {name: module for name, module in model.named_modules() if are_experts(module)}
        self.run, self.device, self.counts = run, device, counts
        self.tokens: dict[str, Any] = dict.fromkeys(found)  # of each layer of this rank: (experts)
        self.experts: dict[str, int] = {}  # how many, of each layer of the model: stages of a pipeline have some each
        for of_rank in ranks.gather({name: module.num_experts for name, module in found.items()}):
            self.experts |= of_rank
        # Of this micro-batch: (rows, tokens), false for filler and padding; None between micro-batches, where others may count.
        self.real: Any = None
        for name, module in found.items():
            module.register_forward_pre_hook(partial(self._count, name, module.num_experts))

    def before_micro_batch(self, inputs: Inputs) -> None:
        self.real = inputs[REAL]

    def after_micro_batch(self, loss: torch.Tensor) -> None:
        self.real = None

    def _count(self, name: str, experts: int, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if not module.training or self.real is None or len(args) < 2 or computes_gradients():
            return
        chosen = args[1].long()  # of each token its experts: (tokens, top_k)
        if self.tokens[name] is None:
            self.tokens[name] = chosen.new_zeros(experts)
        if self.real.numel() == len(chosen):
            counted = self.real.reshape(-1, 1).expand_as(chosen).long()
        else:  # a tile of a sequence (tiled_mlp)
            counted = torch.ones_like(chosen)
        self.tokens[name].scatter_add_(0, chosen.flatten(), counted.flatten())

    def add_figures(self, logs: dict[str, float], step: int) -> None:
        """Figures since the last entry, over all ranks, and the same by layer and expert in expert_load.json. A collective.

        expert_balance: tokens of a layer's busiest expert / tokens of its mean one, mean over layers: 1 where all get the same
        busiest_expert: percent of its layer's tokens that the busiest expert of all layers got
        idle_experts: percent of all experts, those that got none
        """
        none = {
            name: torch.zeros(experts, dtype=torch.long, device=self.device) for name, experts in self.experts.items()
        }
        own = {name: layer for name, layer in self.tokens.items() if layer is not None}
        self.tokens = dict.fromkeys(self.tokens)
        total = torch.cat([*(none | own).values()]) * self.counts
        if distributed.is_initialized():
            distributed.all_reduce(total)
        if not total.any():
            return
        layers = total.double().cpu().split([*self.experts.values()])
        shares = [layer / layer.sum().clamp(min=1) for layer in layers]
        if self.run.world.is_main_rank:
            rounded = [[round(share, 6) for share in layer.tolist()] for layer in shares]
            text = json.dumps({"step": step, "shares": dict(zip(self.experts, rounded, strict=True))})
            files.write(self.run.directory / FILE, text + "\n")
        logs |= {
            "expert_balance": sum(float(layer.max()) * len(layer) for layer in shares) / len(shares),
            "busiest_expert": 100 * max(float(layer.max()) for layer in shares),
            "idle_experts": 100 * float((torch.cat(shares) == 0).double().mean()),
        }
