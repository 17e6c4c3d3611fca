"""The engines where the tokens of a row are divided over ranks (engines/sequence.py).

To each of them these are plain data-parallel ranks: states are sharded over all of them, gradients are means over all of them.
"""

from typing import Any

from .. import upstream
from ..parallel import sequence
from ..strategy.axis_keys import DS_KEYS
from . import engines


class DividedRows(engines.OneProcess):
    def load_model(self, weights: str) -> Any:
        model = super().load_model(weights)
        group = sequence.group_of(self.run.strategy.axes, self.run.world)
        sequence.install(upstream.attention_of(model.config), group)
        return model

    def arguments(self) -> dict[str, Any]:
        options = super().arguments()
        if "deepspeed" in options:  # DeepSpeed's own Ulysses wants it; this is ours
            options["deepspeed"].pop(DS_KEYS["sequence"], None)
        return options

    def collate(self, *how: Any) -> sequence.DividedRows:
        axes, world = self.run.strategy.axes, self.run.world
        number = axes.place(world.rank, world.size).sequence
        return sequence.DividedRows(*how, number=number, of=axes.sequence)


def with_divided_rows(engine: type[engines.OneProcess]) -> type[engines.OneProcess]:
    """The same engine, whose rows are divided."""
    return type(f"{engine.__name__}WithDividedRows", (DividedRows, engine), {})
