"""Brigade's Trainer: Transformers' loop over our own batches, our evaluation and our checkpoints.

It adapts: engines (engine.py) know what DDP, DeepSpeed, FSDP2 and pipelines need, and features (hooks.py) attach to it what only
some runs have. Transformers' private methods that it replaces are in upstream/trainer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_callback import TrainerCallback
from transformers.utils import ModelOutput

from ...errors import UserError
from .. import upstream
from ..checkpoint import compatibility, manifest, states
from ..data.answers import ANSWERS
from ..data.collate import ABOUT, REAL, TEACHER, WEIGHTS, Inputs, MicroBatch
from ..data.prepare import Prepared
from ..distributed import heartbeat, ranks
from ..distributed.process import this_process
from ..engines import parameter_groups, resharding
from ..engines.engine import Engine
from ..local.elastic_steps import replica_of
from ..loss import own_loss
from ..loss.distillation import Distillation
from ..loss.objective_checks import way_of_sharing
from ..loss.preferences import Preferences
from ..loss.router_loss import RouterLoss
from ..model import base_files, packed_samples, processor_files, sample_by_sample
from ..model.base_files import BaseFiles
from ..model.experts import router_loss_coef, without_router_loss
from ..model.images import tower
from ..recipe.objectives import objective_of
from ..recipe.training_section import OWN_OPTIMIZERS
from ..run.directory import Run
from ..upstream.trainer import count_once, end_workers
from ..watch.slow_ranks import SlowRanks
from ..watch.stopping import Stopping
from ..watch.throughput import Meter, device_name, model_shape
from . import bad_steps, features, nonfinite, saved_model
from .agreement import Agreement
from .checkpoints import Checkpoints
from .evaluation import EvaluatingTrainer
from .expert_balance import ExpertBalance
from .optimizers import own_optimizer
from .router_bias import RouterBias

NOT_FOR_MODELS = (ABOUT, REAL, WEIGHTS, TEACHER, ANSWERS, tower.TOWER)  # keys of a micro-batch


class _Prepared(Exception):
    """Everything that comes before the first step is ready, and --prepare asks for no more."""


class Trainer(EvaluatingTrainer):
    """Transformers' Trainer over our own batches.

    Losses are sums over supervised tokens divided by their number over the global batch (Transformers does that when
    the model takes num_items_in_batch), so neither accumulation nor the number of ranks changes them. Where samples have weights,
    both sums are of tokens times their weights.

    place: this rank's place on the axes
    options: those of each forward pass
    parameters: the model's; looking for them in all its modules takes as long as clipping their gradients
    """

    model_accepts_loss_kwargs: bool  # Transformers' own
    router_loss: RouterLoss | None = None
    router_bias: RouterBias | None = None
    preferences: Preferences | None = None
    distillation: Distillation | None = None
    weights: str  # the directory that the model was loaded from
    options: Mapping[str, Any] = {}

    def __init__(
        self,
        run: Run,
        engine: Engine,
        model: PreTrainedModel,
        args: TrainingArguments,
        data: Prepared,
        tokenizer: PreTrainedTokenizerBase,
        callbacks: tuple[TrainerCallback, ...] = (),
    ) -> None:
        training = run.settings.recipe.training
        optimizer = None  # Transformers builds it
        if training.optim in OWN_OPTIMIZERS:
            optimizer = own_optimizer(training.optim, args, training.optim_args)
        super().__init__(
            model=model,
            args=args,
            train_dataset=data.train,
            eval_dataset=data.heldout,
            processing_class=tokenizer,
            callbacks=list(callbacks),
            optimizer_cls_and_kwargs=optimizer,
        )
        objective = objective_of(training)
        if objective.compares:  # objective_checks.py has tried it
            self.model_accepts_loss_kwargs = True
        elif own_loss.is_doubtful(model, self.model_accepts_loss_kwargs):
            place, trusts = run.settings.place("model_name_or_path"), run.settings.recipe.model.trust_remote_code
            why = own_loss.why_not_divided(model.config, trusts, run.settings.recipe.data.images)
            if why:
                problem = f"the loss of {type(model).__name__} would depend on accumulation and ranks: {why}"
                cure = "choose a causal language model of Transformers"
                if getattr(model.config, "z_loss_coefficient", 0):  # Bamba
                    cure = "set z_loss_coefficient: 0.0 in its config.json, and z_loss_coef in the recipe"
                raise UserError(place, problem, cure)
            self.model_accepts_loss_kwargs = True
        self.run, self.engine, self.data = run, engine, data
        self.place = run.strategy.axes.place(run.world.rank, run.world.size)
        self.data_rank = run.world.replica * run.strategy.axes.data(run.world.size) + self.place.data
        self.looks_as = self.data_rank, run.batch.data_parallel_size
        if run.world.replicas > 1:  # whoever of the others is there
            self.looks_as = self.place.data, run.strategy.axes.data(run.world.size)
        own_experts = any(map(upstream.are_experts, model.modules()))
        has_experts = any(ranks.gather(own_experts)) if run.strategy.axes.stages > 1 else own_experts
        # No hooks in a compiled program.
        counts_experts = has_experts and not training.torch_compile
        experts = [ExpertBalance(run, model, args.device, counts=self.place.tensor == 0)] if counts_experts else []
        coefficient = router_loss_coef(run.settings, model.config)
        self.router_loss = RouterLoss(self, coefficient, run.strategy.axes.tensor) if coefficient else None
        rate = training.router_bias_update_rate
        if rate:
            self.router_bias = RouterBias(self, rate, counts=self.place.tensor == 0)
        if objective.scores:
            model.config.pad_token_id = tokenizer.pad_token_id  # by which a classifier finds the last token
        if objective.compares:
            self.preferences = Preferences(self)
        if training.teacher:
            self.distillation = Distillation(self)
        self.processor_files = processor_files.read(run.settings)
        engine.attach(self)
        self._set_up_batches(marks=bool(experts or self.router_loss or self.router_bias))
        total, trained = engine.parameter_count(model), engine.parameter_count(model, trained=True)
        # A host writes the whole model, or its part of all states: weights, a copy and two moments, at most in fp32; and what
        # schedule-free AdamW trains with beside its average.
        kept = 16 if training.optim == "schedule_free_adamw" else 12
        states = (4 * total + kept * trained) / (run.world.hosts if run.shared else 1)
        this_process.heartbeat.page[heartbeat.BYTES] = max(4 * total, states)
        self.meter = Meter(
            total, *model_shape(model.config), run.offers.peak_tflops(device_name()), self.place.speaks_for_its_data
        )
        if run.world.size > 1:
            self.meter.slow = SlowRanks(run)
        self.nonfinite, self.checkpoints = nonfinite.NonFinite(self), Checkpoints(self, int(4 * total + states))
        self.agreement = Agreement(self) if run.world.size > 1 else None
        self.stopping, self.replica = Stopping(run, self.meter), replica_of(self)
        offered = run.offers.callbacks(run, self.meter, model.config, trained)
        learns = [self.nonfinite, *experts, self.router_loss, self.router_bias, self.preferences, self.distillation]
        keeps = [self.agreement, self.checkpoints]
        self.features = features.attach(self, list(filter(None, learns)), list(filter(None, keeps)), offered)

    def _set_up_batches(self, marks: bool) -> None:
        """Settle how samples become micro-batches, and how those of a sequence are kept apart. marks: as in Layout"""
        settings, config = self.run.settings, self.model.config
        self.pad_token_id = self.processing_class.pad_token_id
        how, trusts = self.run.kernels.attention, settings.recipe.model.trust_remote_code
        sharing, _ = way_of_sharing(self.run, config)
        shares = sharing != packed_samples.NOTHING
        self.sample_boundaries = sharing if shares else packed_samples.method_of(config, how, trusts)[0]
        self.samples = sample_by_sample.divide(self.model)
        if self.data.images:
            tower.take_over(self.model)
        layout = packed_samples.layout_of(settings, config, how, marks, self.data.images, shares)
        self.collate = self.engine.collate(self.pad_token_id, layout)
        self.options = without_router_loss(config) if self.run.strategy.axes.stages == 1 else {}

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer as Transformers does, with separate groups for what has another learning rate or is Muon's."""
        is_made = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        training = self.run.settings.recipe.training
        whole = self.model if model is None else model
        if parameter_groups.divides(training) and not is_made:
            parameter_groups.check(self)
            parameter_groups.divide(optimizer, whole, training, self.run.batch.learning_rate)
        ratio = self.run.settings.recipe.model.loraplus_lr_ratio
        if ratio and not is_made:
            parameter_groups.divide_lora_plus(optimizer, whole, ratio)
        return optimizer

    def train_from(self, checkpoint: Path | None) -> None:
        """Train from a checkpoint, or from the beginning. A checkpoint that is being written is finished whatever happens."""
        try:
            self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except _Prepared:
            self.stopping.take("--prepare", 0)
        except BaseException:
            self.checkpoints.let_finish()
            raise
        finally:
            for feature in self.features:
                feature.ended()
            loader = self.callback_handler.train_dataloader
            if loader is not None:  # as a truth value it would be its length
                end_workers(loader)

    # ---- before the first step ---------------------------------------------------------------------------------------
    def before_wrapping(self, checkpoint: Path | None) -> None:
        this_process.timeline.enter("engine")
        for feature in self.features:
            feature.before_wrapping(checkpoint)
        if checkpoint:
            self.meter.tokens_before = manifest.recorded(checkpoint).get("tokens", 0)

    def after_wrapping(self, checkpoint: Path | None, steps: int) -> None:
        self.engine.prepare_optimizer(self)
        if checkpoint:
            this_process.timeline.enter("checkpoint")
        if checkpoint and self.loads_by_itself(checkpoint):
            self.engine.load_states(self, checkpoint)
        elif checkpoint:
            resharding.reshard(self, checkpoint)
        if checkpoint:
            upstream.take_rates_of(self.lr_scheduler)
        this_process.timeline.enter("engine")
        self.parameters = list(self.model.parameters())
        count_once(self.model)
        self.model_wrapped.train()  # all modules: from_pretrained leaves them in eval mode, and a wrapper's own mode hides it
        self.engine.begin(self, checkpoint, steps)
        for feature in self.features:
            feature.begin(checkpoint)
        if self.run.settings.prepare:
            raise _Prepared

    def loads_by_itself(self, checkpoint: Path) -> bool:
        """Whether the engine reads it; if not, another engine or another number of ranks wrote it, and it is resharded."""
        return compatibility.is_native(checkpoint, self.run)

    def complete_weights(self, checkpoint: Path) -> None:
        states.complete(self.model, checkpoint)

    # ---- a step ------------------------------------------------------------------------------------------------------
    def training_step(
        self, model: torch.nn.Module, inputs: MicroBatch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        this_process.heartbeat.enter(heartbeat.FORWARD)
        self.engine.before_micro_step(self, model)
        for feature in self.features:
            feature.before_micro_batch(inputs)
        loss = self.forward_and_backward(model, inputs, num_items_in_batch)
        for feature in self.features:
            feature.after_micro_batch(loss)
        this_process.heartbeat.enter(heartbeat.OPTIMIZER)  # under DeepSpeed it was a part of the backward pass
        return loss

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: MicroBatch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ModelOutput]:
        """Return the sum of the cross-entropy over this micro-batch's supervised tokens / num_items_in_batch; or of what an
        objective makes of its answers.

        In training, with the routers' loss where it is asked for, and times the ranks over which the engine averages gradients.
        Without a cache: with one, the second sample of a sequence would see the first.
        """
        inputs = self.distillation.read(inputs) if self.distillation else inputs
        outputs = self.outputs(model, inputs, num_items_in_batch)
        this_process.heartbeat.enter(heartbeat.BACKWARD if self.model.training else heartbeat.EVALUATION)
        loss = outputs.loss
        if self.preferences:
            loss = self.preferences.loss(loss, inputs, num_items_in_batch)
        if self.model.training:
            whole = loss + self.router_loss.term() if self.router_loss else loss
            loss = nonfinite.spread(whole, self.engine.averaged_over)
        return (loss, outputs) if return_outputs else loss

    def outputs(
        self, model: PreTrainedModel, inputs: Inputs, num_items_in_batch: torch.Tensor | int | None
    ) -> ModelOutput:
        """Return what a forward pass over a micro-batch gives, of the model, of a part of it, or of a second one."""
        about, made, weights = inputs.get(ABOUT), inputs.get(tower.TOWER), inputs.get(WEIGHTS)
        said = inputs.get(TEACHER)
        inputs = {key: value for key, value in inputs.items() if key not in NOT_FOR_MODELS} | dict(self.options)
        with this_process.forward_pass.told(about and about.end_to_end, made, weights, said):
            way = self.sample_boundaries
            if way in packed_samples.BY_MASKS and "attention_mask" not in inputs:
                masked = model if isinstance(model, PreTrainedModel) else self.model  # and no wrapper or part of it
                about_masks = masked.config, inputs["position_ids"], masked.dtype, way
                inputs["attention_mask"] = packed_samples.masks(*about_masks)
            return model(**inputs, use_cache=False, num_items_in_batch=num_items_in_batch)

    def token_losses(self, inputs: Inputs) -> torch.Tensor:
        """Return the loss of each target of a micro-batch, where an objective compares answers: (targets,) in fp32."""
        with self.compute_loss_context_manager():
            losses: torch.Tensor = self.outputs(self.model_wrapped, inputs, None).loss
        return losses

    def clip(self, model: torch.nn.Module, max_norm: float) -> torch.Tensor | float | None:
        return self.engine.clip(self, model, max_norm)

    def judge(self, norm: torch.Tensor | float | None) -> torch.Tensor | float | None:
        return self.nonfinite.judge(norm)

    # ---- between steps -----------------------------------------------------------------------------------------------
    def at_rest(self) -> ExitStack:
        """Return the context in which the model is evaluated or saved."""
        entered = ExitStack()
        for feature in self.features:
            entered.enter_context(feature.at_rest())
        return entered

    def save_checkpoint(self) -> None:
        """Write a checkpoint that is whole or absent; removing older ones comes last. A collective.

        Raises UserError where a trained weight is not finite, ranks no longer hold what they should, or the previous checkpoint
        could not be written.
        """
        with this_process.heartbeat.within(heartbeat.CHECKPOINT), self.meter.pause(), self.at_rest():
            bad_steps.check_weights(self)
            if self.agreement:
                self.agreement.check()
            self.checkpoints.save()

    @cached_property
    def base_files(self) -> BaseFiles:
        """What the files hold that the model was loaded from."""
        return base_files.look(self.run.settings, Path(self.weights), self.model.config)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model in Hugging Face format, into the run's directory or another one. A collective.

        _internal_call: the engine's part of a checkpoint, which Transformers writes
        """
        folder = Path(output_dir or self.args.output_dir)
        if _internal_call:
            super().save_model(output_dir, _internal_call)
        else:
            saved_model.save(self, folder)
        if self.args.should_save and self.replica.speaks:
            processor_files.write(self.processor_files, folder)
