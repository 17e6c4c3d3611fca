"""Which engine runs a strategy."""

from __future__ import annotations

from transformers import PreTrainedModel

from .. import upstream
from ..data.collate import Layout
from ..run.directory import Run
from ..strategy.axis_keys import DS_KEYS
from .ddp_engine import DDP
from .deepspeed_engine import DeepSpeed, TensorDeepSpeed
from .engine import Engine, Keywords
from .fsdp2_engine import FSDP2, HSDP, ExpertFSDP2, ExpertHSDP, TensorFSDP2, TensorHSDP
from .parallel import sequence
from .pipeline_engine import PipelineEngine

# Kind of strategy -> its engine: where only the data is divided, ...
DATA: dict[str, type[Engine]] = {
    "single": Engine,
    "ddp": DDP,
    "zero1": DeepSpeed,
    "zero2": DeepSpeed,
    "zero3": DeepSpeed,
    "fsdp2": FSDP2,
    "hsdp": HSDP,
}
# ... where tensor groups divide the layers, ...
TENSOR: dict[str, type[Engine]] = {
    "ddp": TensorHSDP,
    "zero1": TensorDeepSpeed,
    "zero2": TensorDeepSpeed,
    "zero3": TensorDeepSpeed,
    "fsdp2": TensorFSDP2,
    "hsdp": TensorHSDP,
}
# ... and where groups of ranks divide the experts.
EXPERTS: dict[str, type[Engine]] = {"ddp": ExpertHSDP, "fsdp2": ExpertFSDP2, "hsdp": ExpertHSDP}


def engine_of(run: Run) -> Engine:
    """Return the engine of a run's strategy; strategy/refused.yaml has refused each strategy that has none."""
    axes, kind = run.strategy.axes, run.strategy.kind
    if axes.stages > 1:
        engine: type[Engine] = PipelineEngine
    else:
        engine = (EXPERTS if axes.experts > 1 else TENSOR if axes.tensor > 1 else DATA)[kind]
    if axes.sequence > 1:
        engine = type(f"{engine.__name__}WithDividedSequences", (DividedSequences, engine), {})
    return engine(run)


class DividedSequences(Engine):
    """Mixed into an engine where ranks divide the tokens of each sequence (engines/parallel/sequence.py).

    To the engine these are plain data-parallel ranks: states are sharded and gradients are averaged over all of them.
    """

    def load_model(self, weights: str) -> PreTrainedModel:
        model = super().load_model(weights)
        group = sequence.group_of(self.run.strategy.axes, self.run.world)
        sequence.install(upstream.attention_of(model.config), group)
        if self.run.settings.recipe.data.images:
            sequence.cut_before_decoder(model, *self._part())
        return model

    def arguments(self) -> Keywords:
        options = super().arguments()
        if "deepspeed" in options:  # DeepSpeed's own Ulysses wants it; this is ours
            options["deepspeed"].pop(DS_KEYS["sequence"], None)
        return options

    def collate(self, pad_token_id: int, layout: Layout) -> sequence.DividedSequences:
        return sequence.DividedSequences(pad_token_id, layout, *self._part())

    def _part(self) -> tuple[int, int]:
        """Return (the number of this rank's part of each sequence, how many there are)."""
        axes, world = self.run.strategy.axes, self.run.world
        return axes.place(world.rank, world.size).sequence, axes.sequence
