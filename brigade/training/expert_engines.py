"""The engine of expert parallelism: FSDP2, with each layer's experts divided over groups of ranks (engines/experts.py)."""

from typing import Any

from ..engines import experts
from ..model import experts as of_config
from ..upstream import fsdp2
from .engines import FSDP2


class ExpertParallel(FSDP2):
    """FSDP2 for all but the experts. Every rank has rows of its own, so batches and means are those of FSDP2."""

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        plan = of_config.plan(trainer.model.config)
        ranks = experts.mesh(trainer.args.device.type, self.run.world.size, self.run.strategy.axes.experts)
        fsdp2.shard_before_layers(lambda model, options: experts.shard(model, plan, ranks, options))
