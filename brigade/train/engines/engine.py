"""The base of the engines: what a run asks of DDP, DeepSpeed, FSDP2 and a pipeline, and where each has to be helped.

Methods stand in the order in which a run meets them: options of TrainingArguments, the Trainer, the first step, a micro-step, a
checkpoint. The Trainer calls these methods and knows no engine by name. What touches a private name of another package stands in
brigade/train/upstream/, with its function there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import PreTrainedModel, TrainerState, TrainingArguments

from .. import upstream
from ..checkpoint import saved_weights
from ..data.collate import Collate, Inputs, Layout, MicroBatch
from ..data.prepare import Prepared
from ..data.sampling import Loader
from ..model import load
from ..model.base_files import BaseFiles
from ..model.sizes import half_or_full, parameter_count
from ..recipe.training_section import COUNT_IN_GROUPS
from ..run.directory import Run
from ..strategy.axes import Place
from ..upstream import checkpoint_files, peft_layers, unpickling
from ..upstream.trainer import clear_only, scale_losses_on_cpus
from ..watch.stopping import Stopping
from ..watch.throughput import Meter
from . import recomputing, shares
from .gradient_clipping import clip_
from .kernels import apply_liger
from .muon import Muon

if TYPE_CHECKING:
    from accelerate import Accelerator
    from deepspeed import DeepSpeedEngine
    from transformers.utils import ModelOutput

    from ..checkpoint.states import States
    from ..data import store
    from ..model.sample_by_sample import Samples
    from .shares import Moments, Share


Keywords = dict[str, Any]  # arguments of another package's function


class Engine:
    """What all engines have in common; on its own, it is the engine of one process."""

    power_sgd: Any = None  # its state, where DDP's hook is PowerSGD
    adapter_layers: Sequence[Any] = ()  # modules with adapters, once they have been looked for
    has_head = True  # whether this rank has the output layer

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

    def load_model(self, weights: str) -> PreTrainedModel:
        """Return the model from the directory `weights`, before any adapter. Call it once TrainingArguments exist."""
        settings, attention = self.run.settings, self.run.kernels.attention
        return load.load_model(settings, weights, self.load_dtype(), attention, **self.where())

    def where(self) -> Keywords:
        """Return what from_pretrained is told about where weights lie: each goes straight to this rank's GPU. Were the model
        first whole in the host's memory, it would take 4 bytes per parameter there, on each rank."""
        return {} if self.cpu else {"device_map": {"": torch.device("cuda", torch.cuda.current_device())}}

    def fuse(self, model: PreTrainedModel) -> None:
        """Put Liger's kernels into load_model()'s model, before its loss and adapters."""
        apply_liger(model, self.run.settings.place("use_liger_kernel"))

    def with_adapters(self, model: torch.nn.Module, weights: str) -> PreTrainedModel:
        """Return load_model()'s model with adapters. weights: where its own came from"""
        from ..model import adapter_weights, adapters

        model = adapters.wrap(model, self.run.settings, weights)
        settings = self.run.settings
        adapter_weights.load(model, adapter_weights.find(settings))
        return model

    def arguments(self) -> Keywords:
        """Return options of TrainingArguments. Once these exist, ZeRO-3 and FSDP2 decide how a model is loaded."""
        if not self.training.activation_checkpointing:
            return {}
        return {"activation_checkpointing": True, "activation_checkpointing_kwargs": recomputing.options(self.training)}

    def after_arguments(self, arguments: TrainingArguments) -> None:
        upstream.take_one_device(arguments)

    # ---- the Trainer and its model ---------------------------------------------------------------------------------
    def attach(self, trainer: StepContext) -> None:
        """Called once the Trainer exists, before it wraps its model."""
        recomputing.check(trainer.model, self.run.settings)
        if self.training.fp16 and self.cpu:
            scale_losses_on_cpus(trainer.accelerator)
        if not self.run.shared:
            upstream.save_on_the_first_rank_alone(trainer.model)

    def collate(self, pad_token_id: int, layout: Layout) -> Collate:
        """Return what makes micro-batches of samples."""
        return Collate(pad_token_id, layout)

    def prepare_optimizer(self, trainer: StepContext) -> None:
        """Called once the optimizer is wrapped, before it gets a checkpoint's states. A collective."""
        optimizer = self.optimizer(trainer)
        inside = getattr(optimizer, "optimizer", optimizer)
        if isinstance(inside, Muon):  # accelerate wraps it
            inside.divide_matrices(trainer.model, self.shares(trainer), trainer.args.device)

    def begin(self, trainer: StepContext, checkpoint: Path | None, steps: int) -> None:
        """Called once the model has its weights, before the first of `steps` steps."""
        clear_only(trainer.model_wrapped, trainer.parameters)
        recomputing.begin(trainer.model, trainer.samples, self.run.settings)

    def parameter_count(self, model: torch.nn.Module, trained: bool = False) -> int:
        """Count the parameters of the whole model, whatever part of it this rank has."""
        return parameter_count(model, trained)

    def whole_model(self, trainer: StepContext) -> PreTrainedModel:
        """Return a model with all names of the model's parameters, in its order; it may be on the meta device."""
        return trainer.model

    def summary(self) -> dict[str, str]:
        """Return further lines of the run's summary."""
        return {}

    # ---- a step ----------------------------------------------------------------------------------------------------
    def before_micro_step(self, trainer: StepContext, model: torch.nn.Module) -> None:
        """Called before each forward and backward pass."""

    def clip(self, trainer: StepContext, model: torch.nn.Module, max_norm: float) -> torch.Tensor | float | None:
        """Clip gradients, and return their norm before; it stays on the device, for only logging waits for it."""
        trainer.accelerator.unscale_gradients()
        return clip_(trainer.parameters, max_norm)

    def drop_step(self, trainer: StepContext) -> None:
        """Leave the optimizer's step out: without gradients it has nothing to do, and changes no state."""
        trainer.model.zero_grad(set_to_none=True)

    def adapters_off(self, trainer: StepContext) -> AbstractContextManager[None]:
        """Return the context in which the model computes as it did before it got adapters."""
        self.adapter_layers = self.adapter_layers or peft_layers.layers(trainer.model)
        return peft_layers.switched_off(self.adapter_layers)

    def held(self, trainer: StepContext) -> Iterator[tuple[str, object, torch.Tensor]]:
        """Yield what this rank has of each parameter, trained or not: a name, which part of the whole it is, and that part's
        memory."""
        divided = shares.in_four_bits(trainer.model) if self.run.strategy.axes.tensor > 1 else set()
        for name, parameter in trainer.model.named_parameters():
            name, part = shares.name_of(name), self.part_of(name, parameter)
            part = shares.OwnPart(shares.chunk_of(parameter)) if name in divided else part
            yield name, part, shares.local_part(parameter)
            if hasattr(parameter, "quant_state"):
                yield f"scales of {name}", part, parameter.quant_state.absmax

    def held_states(self, trainer: StepContext) -> Iterator[tuple[str, object, torch.Tensor]]:
        """Yield the optimizer's states of these parts in the same form."""
        states = self.optimizer(trainer).state
        for name, parameter in trainer.model.named_parameters():
            name, part = shares.name_of(name), self.part_of(name, parameter)
            for key, value in states.get(parameter, {}).items():
                if torch.is_tensor(value):
                    yield f"{key} of {name}", part, shares.local_part(value)

    def part_of(self, name: str, parameter: torch.Tensor) -> object:
        """Return which part of a parameter this rank has: what shares.chunk_of() says, or an OwnPart."""
        return shares.chunk_of(parameter)

    # ---- an evaluation ---------------------------------------------------------------------------------------------
    def answering(self, trainer: StepContext) -> AbstractContextManager[None]:
        """Return the context in which the model generates answers."""
        return nullcontext()

    # ---- a checkpoint ----------------------------------------------------------------------------------------------
    def save_weights(self, trainer: StepContext, folder: Path) -> None:
        """Write a checkpoint's weights, in parts or whole."""
        checkpoint_files.save_weights(trainer, folder)
        generates = getattr(trainer.model, "generation_config", None) is not None  # and scores nothing
        if generates and trainer.args.should_save and (folder / saved_weights.ADAPTER).exists():
            # PEFT saves adapters, and nothing of where an answer ends.
            trainer.model.generation_config.save_pretrained(str(folder))

    def save_optimizer(self, trainer: StepContext, folder: Path) -> None:
        """Write the optimizer's states and the schedule."""
        checkpoint_files.save_optimizer(trainer, folder)

    def save_states(self, folder: Path) -> None:
        """Write what belongs to a checkpoint besides what Transformers writes there."""

    def load_states(self, trainer: StepContext, checkpoint: Path) -> None:
        """Load what Transformers leaves out when it loads optimizer states."""

    def shares(self, trainer: StepContext) -> Iterable[Share]:
        """Return shares.Share: what this rank steps of each trained parameter, and where that lies in memory."""
        return shares.shares_of(trainer.model)

    def reading(self, source: States, trainer: StepContext) -> Any:
        """Return a checkpoint's states, read by these shares' own numbers."""
        return source

    def spread_weights(self, trainer: StepContext) -> None:
        """Let the model compute with these shares, once their weights have been set. A collective."""

    def optimizer(self, trainer: StepContext) -> torch.optim.Optimizer:
        """Return the optimizer that steps these shares."""
        return trainer.optimizer

    def load_moments(self, trainer: StepContext, moments_of: Moments) -> None:
        """Give the optimizer moments. moments_of: id of the tensor that it steps -> that one's moments and step"""
        shares.load_moments(trainer.optimizer, moments_of, self.training.optim in COUNT_IN_GROUPS)

    def loss_scale(self, trainer: StepContext) -> dict[str, float] | None:
        """Return the state of fp16's loss scale, with "scale" in it, or None where no loss is scaled."""
        scaler = trainer.accelerator.scaler
        return scaler.state_dict() if scaler is not None else None

    def set_loss_scale(self, trainer: StepContext, state: Mapping[str, float]) -> None:
        """Set those values of loss_scale() that `state` has; do nothing where no loss is scaled."""
        scaler = trainer.accelerator.scaler
        if scaler is not None:
            scaler.load_state_dict(scaler.state_dict() | state)

    def whole_state(self, trainer: StepContext) -> dict[str, torch.Tensor] | None:
        """Return the state dict to save, or None where Transformers gathers it: of adapters, and where weights stay in parts."""
        return None if self.run.settings.recipe.model.use_peft else trainer.model.state_dict()

    def kept_dtype(self) -> torch.dtype:
        """Return the highest precision of the trained weights that it can gather."""
        return self.load_dtype()

    def masters(self, trainer: StepContext) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that it holds in a higher precision than whole_state() has them, one after another. A collective."""
        return iter(())

    def model_to_save(self, trainer: StepContext) -> PreTrainedModel:
        """Return the model that can write whole_state() in Hugging Face format."""
        return trainer.model

    def gathers_weights(self, trainer: StepContext) -> bool:
        """Whether the saved model has its weights in Hugging Face format."""
        return True


class StepContext(Protocol):
    """What the parts of a step may use of the Trainer that runs them: none needs its type, nor another part through it.

    model, model_wrapped: as Transformers' Trainer has them: the model itself, and what the engine has put around it
    parameters: the model's; looking for them in all its modules takes as long as clipping their gradients
    place, data_rank: of this rank, on the axes and among all that see different sequences, over all replicas
    looks_as: (this rank, of how many) in evaluations
    samples: what divides a pass over several samples, where the model needs that (model/sample_by_sample.py)
    deepspeed: DeepSpeed's engine, where it trains
    """

    run: Run
    engine: Engine
    model: PreTrainedModel
    model_wrapped: torch.nn.Module
    parameters: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler
    accelerator: Accelerator
    deepspeed: DeepSpeedEngine
    args: TrainingArguments
    state: TrainerState
    data: Prepared
    samples: Samples | None
    place: Place
    data_rank: int
    looks_as: tuple[int, int]
    meter: Meter
    stopping: Stopping

    @property
    def base_files(self) -> BaseFiles: ...

    def eval_loader(
        self, samples: store.Samples | torch.utils.data.Subset, alone: tuple[int, int] | None = None
    ) -> Loader: ...

    def to_device(self, inputs: MicroBatch) -> MicroBatch: ...

    def outputs(
        self, model: torch.nn.Module, inputs: Inputs, num_items_in_batch: torch.Tensor | int | None
    ) -> ModelOutput: ...

    def token_losses(self, inputs: Inputs) -> torch.Tensor: ...

    def compute_loss_context_manager(self) -> AbstractContextManager[None]: ...

    def engines_norm(self, model: torch.nn.Module) -> torch.Tensor | float | None: ...

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]: ...
