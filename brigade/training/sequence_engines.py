"""The engines where the tokens of a row are divided over ranks (engines/sequence.py).

To each of them these are plain data-parallel ranks: states are sharded over all of them, gradients are means over all of them.
"""

from typing import Any

from .. import upstream
from ..engines import sequence
from ..strategy.axes import without
from . import engines


class DividedRows(engines.OneProcess):
    def load_model(self, weights: str) -> Any:
        model = super().load_model(weights)
        group = sequence.group_of(self.run.strategy.axes, self.run.world)
        sequence.install(upstream.attention_of(model.config), group)
        return model

    def arguments(self) -> dict[str, Any]:
        options = super().arguments()
        if "deepspeed" in options:  # DeepSpeed's own Ulysses wants sequence_parallel_size; this is ours
            options["deepspeed"] = without(options["deepspeed"])
        return options

    def collate(self, *how: Any) -> sequence.DividedRows:
        axes, world = self.run.strategy.axes, self.run.world
        number = axes.place(world.rank, world.size).sequence
        return sequence.DividedRows(*how, number=number, of=axes.sequence)


class DDP(DividedRows, engines.DDP):
    pass


class DeepSpeed(DividedRows, engines.DeepSpeed):
    pass


class FSDP2(DividedRows, engines.FSDP2):
    pass


class HSDP(DividedRows, engines.HSDP):
    pass


ENGINES = {
    "ddp": DDP,
    "zero1": DeepSpeed,
    "zero2": DeepSpeed,
    "zero3": DeepSpeed,
    "fsdp2": FSDP2,
    "hsdp": HSDP,
}
