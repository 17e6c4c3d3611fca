"""The base of the engines: what a run asks of DDP, DeepSpeed, FSDP2 and a pipeline, and where each has to be helped.

Methods stand in the order in which a run meets them: options of TrainingArguments, the Trainer, the first step, a micro-step, a
checkpoint. The Trainer calls these methods and knows no engine by name. What touches a private name of another package stands in
brigade/train/upstream/, with its line there.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import upstream
from ..checkpoint import saved_weights
from ..data.collate import Collate
from ..model import load, supervised_loss, token_losses
from ..model.sizes import half_or_full, parameter_count
from ..parallel import tiled
from ..recipe import objectives
from ..recipe.objectives import objective_of
from ..recipe.training_section import COUNT_IN_GROUPS
from ..run.directory import Run
from ..upstream import checkpoint_files, peft_layers, unpickling
from ..upstream.fp16_on_cpus import scale_losses_on_cpus
from ..upstream.trainer import clear_only
from . import recomputing, resharding
from .gradient_clipping import clip_
from .muon import Muon

if TYPE_CHECKING:
    from .trainer import Trainer


class Engine:
    """What is common to all engines; by itself the engine of one process."""

    power_sgd: Any = None  # its state, where DDP's hook is PowerSGD
    adapter_layers: Sequence[Any] = ()  # modules with adapters, once they have been looked for

    def __init__(self, run: Run) -> None:
        unpickling.data_only()
        self.run, self.training, self.cpu = run, run.settings.recipe.training, not torch.cuda.is_available()
        # A loss is multiplied by it: gradients are means over so many ranks, of which those of a tensor group or a pipeline
        # compute with the same tokens. A replica has only a part of the step's tokens, and the mean over replicas is the step's.
        axes = run.strategy.axes
        self.averaged_over = run.world.size * run.strategy.replicas // (axes.tensor * axes.stages)

    # ---- before the model is loaded --------------------------------------------------------------------------------
    def load_dtype(self) -> torch.dtype:
        """Weights in fp32, cast for the computation (autocast, MixedPrecisionPolicy). Those that stay frozen under adapters
        need no fp32 anywhere."""
        return half_or_full(self.run.settings) if self.run.settings.recipe.model.use_peft else torch.float32

    def load_model(self, weights: str) -> Any:
        """Return the model from the directory `weights`, before any adapter. Call it once TrainingArguments exist."""
        settings, attention = self.run.settings, self.run.kernels.attention
        return self.with_own_loss(load.load_model(settings, weights, self.load_dtype(), attention, **self.where()))

    def where(self) -> dict[str, Any]:
        """Return what from_pretrained is told about where weights lie: each goes straight to this rank's GPU. Were the model
        first whole in the host's memory, it would take 4 bytes per parameter there, on each rank."""
        return {} if self.cpu else {"device_map": {"": torch.device("cuda", torch.cuda.current_device())}}

    def with_own_loss(self, model: Any) -> Any:
        """Return the model, which computes its loss by tiles or by token where the recipe asks for it."""
        training, objective = self.training, objective_of(self.training)
        by_token = objective.rows != objectives.ANSWERS and not objective.scores
        terms = supervised_loss.Terms.of(training)
        if by_token:
            token_losses.apply(model)
        elif terms != supervised_loss.PLAIN or self.run.settings.recipe.data.weighs_samples:
            supervised_loss.apply(model, terms)
        if training.tiled_loss or training.tiled_mlp:
            tiled.apply(model, training.tiled_loss, training.tiled_mlp, by_token, terms)
        return model

    def with_adapters(self, model: Any, weights: str) -> Any:
        """Return load_model()'s model with adapters. weights: where its own came from"""
        from ..model import adapter_weights, adapters

        model = adapters.wrap(model, self.run.settings, weights)
        settings = self.run.settings
        adapter_weights.load(model, adapter_weights.find(settings))
        return model

    def arguments(self) -> dict[str, Any]:
        """Return options of TrainingArguments. Once these exist, ZeRO-3 and FSDP2 decide how a model is loaded."""
        if not self.training.activation_checkpointing:
            return {}
        return {"activation_checkpointing": True, "activation_checkpointing_kwargs": recomputing.options(self.training)}

    def after_arguments(self, arguments: Any) -> None:
        upstream.take_one_device(arguments)

    # ---- the Trainer and its model ---------------------------------------------------------------------------------
    def attach(self, trainer: "Trainer") -> None:
        """Once the Trainer exists, before it wraps its model."""
        if self.training.fp16 and self.cpu:
            scale_losses_on_cpus(trainer.accelerator)
        if not self.run.shared:
            upstream.save_on_the_first_rank_alone(trainer.model)

    def collate(self, *how: Any) -> Collate:
        """Return what makes micro-batches of samples. how: Collate's arguments"""
        return Collate(*how)

    def prepare_optimizer(self, trainer: "Trainer") -> None:
        """Once the optimizer is wrapped, before it gets a checkpoint's states. A collective."""
        optimizer = self.optimizer(trainer)
        if isinstance(inside := getattr(optimizer, "optimizer", optimizer), Muon):  # accelerate wraps it
            inside.divide_matrices(trainer.model, self.shares(trainer), trainer.args.device)

    def begin(self, trainer: "Trainer", checkpoint: Path | None, steps: int) -> None:
        """Once the model has its weights, before the first of so many steps."""
        clear_only(trainer.model_wrapped, trainer.parameters)
        recomputing.begin(trainer)

    def parameter_count(self, model: Any, trained: bool = False) -> int:
        """Count the parameters of the whole model, whatever part of it this rank has."""
        return parameter_count(model, trained)

    def whole_model(self, trainer: "Trainer") -> Any:
        """Return a model with all names of the model's parameters, in its order; it may be on the meta device."""
        return trainer.model

    def summary(self) -> dict[str, str]:
        """Return further lines of the run's summary."""
        return {}

    # ---- a step ----------------------------------------------------------------------------------------------------
    def before_micro_step(self, trainer: "Trainer", model: Any) -> None:
        """Called before each forward and backward pass."""

    def clip(self, trainer: "Trainer", model: Any, max_norm: float) -> Any:
        """Clip gradients, and return their norm before; it stays on the device, for only logging waits for it."""
        trainer.accelerator.unscale_gradients()
        return clip_(trainer.parameters, max_norm)

    def drop_step(self, trainer: "Trainer") -> None:
        """Leave the optimizer's step out: without gradients it has nothing to do, and changes no state."""
        trainer.model.zero_grad(set_to_none=True)

    def adapters_off(self, trainer: "Trainer") -> AbstractContextManager[None]:
        """While the model computes as it did before it got adapters."""
        self.adapter_layers = self.adapter_layers or peft_layers.layers(trainer.model)
        return peft_layers.switched_off(self.adapter_layers)

    # ---- an evaluation ---------------------------------------------------------------------------------------------
    def answering(self, trainer: "Trainer") -> AbstractContextManager[None]:
        """While the model generates answers."""
        return nullcontext()

    # ---- a checkpoint ----------------------------------------------------------------------------------------------
    def save_weights(self, trainer: "Trainer", folder: Path) -> None:
        """Write a checkpoint's weights, in parts or whole."""
        checkpoint_files.save_weights(trainer, folder)
        generates = getattr(trainer.model, "generation_config", None) is not None  # and scores nothing
        if generates and trainer.args.should_save and (folder / saved_weights.ADAPTER).exists():
            # PEFT saves adapters, and nothing of where an answer ends.
            trainer.model.generation_config.save_pretrained(str(folder))

    def save_optimizer(self, trainer: "Trainer", folder: Path) -> None:
        """Write the optimizer's states and the schedule."""
        checkpoint_files.save_optimizer(trainer, folder)

    def save_states(self, folder: Path) -> None:
        """Write what belongs to a checkpoint besides what Transformers writes there."""

    def load_states(self, trainer: "Trainer", checkpoint: Path) -> None:
        """Load what Transformers leaves out when it loads optimizer states."""

    def shares(self, trainer: "Trainer") -> Any:
        """Return resharding.Shares: what this rank steps of each trained parameter, and where that lies in memory."""
        return resharding.shares_of(trainer.model)

    def reading(self, source: Any, trainer: "Trainer") -> Any:
        """Return a checkpoint's states, read by these shares' own numbers."""
        return source

    def spread_weights(self, trainer: "Trainer") -> None:
        """Let the model compute with these shares, once their weights have been set. A collective."""

    def optimizer(self, trainer: "Trainer") -> Any:
        """Return the optimizer that steps these shares."""
        return trainer.optimizer

    def load_moments(self, trainer: "Trainer", moments_of: Mapping[int, dict[str, Any]]) -> None:
        """Give the optimizer moments. moments_of: id of the tensor that it steps -> that one's moments and step"""
        resharding.load_moments(trainer.optimizer, moments_of, self.training.optim in COUNT_IN_GROUPS)

    def loss_scale(self, trainer: "Trainer") -> dict[str, Any] | None:
        """Return the state of fp16's loss scale, with "scale" in it, or None where no loss is scaled."""
        return scaler.state_dict() if (scaler := trainer.accelerator.scaler) is not None else None

    def set_loss_scale(self, trainer: "Trainer", state: Mapping[str, Any]) -> None:
        """Set what `state` has of loss_scale()'s; nothing where no loss is scaled."""
        if (scaler := trainer.accelerator.scaler) is not None:
            scaler.load_state_dict(scaler.state_dict() | state)

    def whole_state(self, trainer: "Trainer") -> dict[str, torch.Tensor] | None:
        """Return the state dict to save, or None where Transformers gathers it: of adapters, and where weights stay in parts."""
        return None if self.run.settings.recipe.model.use_peft else trainer.model.state_dict()

    def kept_dtype(self) -> torch.dtype:
        """Return the highest precision of the trained weights that it can gather."""
        return self.load_dtype()

    def masters(self, trainer: "Trainer") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that it holds in a higher precision than whole_state() has them, one after another. A collective."""
        return iter(())

    def model_to_save(self, trainer: "Trainer") -> Any:
        """Return the model that can write whole_state() in Hugging Face format."""
        return trainer.model

    def gathers_weights(self, trainer: "Trainer") -> bool:
        """Whether the saved model has its weights in Hugging Face format."""
        return True
