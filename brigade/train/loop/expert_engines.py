"""The engines of expert parallelism: FSDP2, with each layer's experts divided over groups of ranks (engines/experts.py)."""

from typing import Any

from ..model import experts as of_config
from ..parallel import experts
from ..upstream import fsdp2
from .tensor_engines import TensorDDP, TensorFSDP2, TensorHSDP


class DividedExperts(TensorFSDP2):
    """The same engine for all but the experts, whose tokens travel. Its batches and means stay what they are."""

    def attach(self, trainer: Any) -> None:
        axes, plan = self.run.strategy.axes, of_config.plan(trainer.model.config)
        device, world_size = trainer.args.device.type, self.run.world.size
        ranks = experts.groups(device, world_size, axes.experts, self.averaged_over, self.copies, axes.tensor)
        fsdp2.shard_before_layers(lambda model, options: experts.shard(model, plan, ranks, options))
        super().attach(trainer)


class ExpertFSDP2(DividedExperts):
    """What is no expert is sharded over all ranks."""


class ExpertHSDP(DividedExperts, TensorHSDP):
    """Or within groups of them."""


class ExpertDDP(DividedExperts, TensorDDP):
    """Or not at all."""


ENGINES = {"ddp": ExpertDDP, "fsdp2": ExpertFSDP2, "hsdp": ExpertHSDP}
