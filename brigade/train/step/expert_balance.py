"""How evenly a mixture of experts uses its experts. Ranks add their counts up only at a log line."""

import json

import torch
from torch import distributed

from ..distributed import ranks
from ..host import files
from ..run.directory import Run
from ..upstream import are_experts
from .expert_tokens import ExpertTokens

FILE = "expert_load.json"


class ExpertBalance(ExpertTokens):
    """Counts tokens of each expert between two log entries. Making one is a collective.

    device: where collectives take tensors from; counts: False on ranks that compute with another rank's tokens
    """

    def __init__(self, run: Run, model: torch.nn.Module, device: torch.device, counts: bool = True) -> None:
        found = {name: module for name, module in model.named_modules() if are_experts(module)}
        experts: dict[str, int] = {}  # of each layer of the model: stages of a pipeline have some each
        for of_rank in ranks.gather({name: module.num_experts for name, module in found.items()}):
            experts |= of_rank
        super().__init__(experts, device)
        self.run, self.counts = run, counts
        for name, module in found.items():
            self.watch(name, module)

    def _count(self, layer: object, module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if len(given) > 1:  # else it is not told which experts are chosen
            super()._count(layer, module, given)

    def add_figures(self, logs: dict[str, float], step: int) -> None:
        """Figures since the last entry, over all ranks, and the same by layer and expert in expert_load.json. A collective.

        expert_balance: tokens of a layer's busiest expert / tokens of its mean one, mean over layers: 1 where all get the same
        busiest_expert: percent of its layer's tokens that the busiest expert of all layers got
        idle_experts: percent of all experts, those that got none
        """
        total = self.tokens * self.counts
        self.tokens.zero_()
        if distributed.is_initialized():
            distributed.all_reduce(total)
        if not total.any():
            return
        layers = total.double().cpu().split([len(layer) for layer in self.of_layers.values()])
        shares = [layer / layer.sum().clamp(min=1) for layer in layers]
        if self.run.world.is_main_rank:
            rounded = [[round(share, 6) for share in layer.tolist()] for layer in shares]
            text = json.dumps({"step": step, "shares": dict(zip(self.of_layers, rounded, strict=True))})
            files.write(self.run.directory / FILE, text + "\n")
        logs |= {
            "expert_balance": sum(float(layer.max()) * len(layer) for layer in shares) / len(shares),
            "busiest_expert": 100 * max(float(layer.max()) for layer in shares),
            "idle_experts": 100 * float((torch.cat(shares) == 0).double().mean()),
        }
