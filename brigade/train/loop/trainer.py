"""Brigade's Trainer: sampling and evaluation that are exact at any world size, and a bridge to the engines' quirks."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback

from ...errors import UserError
from .. import files, upstream
from ..checkpoint import compatibility, manifest
from ..data.collate import ABOUT, WithFiller
from ..data.sampling import GlobalBatches, Loader, StreamBatches
from ..distributed import heartbeat, ranks
from ..model import packed_samples
from ..model.attention import END_TO_END, NEEDS_CUMULATIVE_LENGTHS
from ..recipe.schema import OWN_OPTIMIZERS
from ..run.directory import Run
from ..upstream import file_modes
from . import nonfinite, resharding, saved_model, write_checkpoint
from .early_stopping import EarlyStopping
from .elastic_steps import local_steps
from .engine import Engine
from .evaluation import EvaluatingTrainer
from .expert_balance import ExpertBalance
from .optimizers import whole_parameter_optimizer
from .progress import Progress
from .report_events import ReportEvents
from .save_interval import SaveInterval
from .show_windows import ShowWindows
from .slow_ranks import SlowRanks
from .stopping import Stopping
from .throughput import Meter, device_name, model_shape

if TYPE_CHECKING:
    from ..checkpoint.saving import Saving
    from ..data.prepare import Prepared


class Trainer(EvaluatingTrainer):
    """Transformers' Trainer over our own batches.

    Accelerate never sees the data loaders: it would shard them once more and repeat samples at an epoch's end.
    Losses are sums over supervised tokens divided by their number over the global batch (Transformers does that when
    the model takes num_items_in_batch), so neither accumulation nor the number of ranks changes them.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        model: Any,
        args: Any,
        data: "Prepared",
        tokenizer: Any,
        callbacks: tuple[Any, ...] = (),
    ) -> None:
        training = run.settings.recipe.training
        optimizer = None  # Trainer builds it by itself
        if training.optim in OWN_OPTIMIZERS:
            optimizer = whole_parameter_optimizer(training.optim, args, training.optim_args)
        super().__init__(
            model=model,
            args=args,
            train_dataset=data.train,
            eval_dataset=data.heldout,
            processing_class=tokenizer,
            callbacks=list(callbacks),
            optimizer_cls_and_kwargs=optimizer,
        )
        if not self.model_accepts_loss_kwargs:
            problem = "takes no num_items_in_batch, so its loss would depend on accumulation and ranks"
            place, cure = run.settings.place("model_name_or_path"), "choose a causal language model of Transformers"
            raise UserError(place, f"{type(model).__name__} {problem}", cure)
        self.run, self.world, self.engine, self.data = run, run.world, engine, data
        self.place = run.strategy.axes.place(run.world.rank, run.world.size)
        # Of all that see different rows, over all replicas.
        self.data_rank = run.world.replica * run.strategy.axes.data(run.world.size) + self.place.data
        self.looks_as = self.data_rank, run.batch.data_parallel_size  # at held-out rows: which rank of how many
        if run.world.replicas > 1:  # whoever of the others is there
            self.looks_as = self.place.data, run.strategy.axes.data(run.world.size)
        self.local_steps: Any = None  # LocalSteps, of several replicas alone
        self.saving: Saving | None = None  # from the first checkpoint on
        self.tokens_before = 0  # of this run, when the checkpoint that it continues from was written
        self.expert_balance: Any = None
        own = any(map(upstream.are_experts, model.modules()))
        has_experts = any(ranks.gather(own)) if run.strategy.axes.stages > 1 else own
        if has_experts and not training.torch_compile:  # no hooks in a compiled program
            self.expert_balance = ExpertBalance(run, model, args.device, counts=self.place.tensor == 0)
        engine.attach(self)
        self.pad_token_id = tokenizer.pad_token_id
        how, trusted = run.kernels.attention, run.settings.recipe.model.trust_remote_code
        self.sample_boundaries, _ = packed_samples.method_of(model.config, how, trusted)
        padding_free, squares, _ = packed_samples.layout(run.settings, model.config, how)
        cumulative = upstream.attention_of(model.config) in NEEDS_CUMULATIVE_LENGTHS
        multiple = 64 if training.torch_compile else 1  # few shapes to compile for
        packing = run.settings.recipe.data.packing
        self.collate = engine.collate(self.pad_token_id, padding_free, packing, cumulative, multiple, squares)
        self.remove_callback(PrinterCallback)
        if run.world.is_main_rank:
            self.add_callback(Progress())
            self.add_callback(ReportEvents(run))
            if data.train.streamed:
                self.add_callback(ShowWindows(run, data.train, self.collate))
        self.add_callback(nonfinite.StepGuard())
        if training.early_stopping_patience:
            self.add_callback(EarlyStopping(training.early_stopping_patience))
        if training.save_steps == "auto":
            self.add_callback(SaveInterval(run, lambda: self.saving.blocked if self.saving else 0.0))
        total, trained = engine.parameter_count(model), engine.parameter_count(model, trained=True)
        # A host writes the whole model alone, or its part of all states: weights, a copy and two moments, at most in fp32.
        states = (4 * total + 12 * trained) / (run.world.hosts if run.shared else 1)
        heartbeat.page[heartbeat.BYTES] = max(4 * total, states)
        self.meter = Meter(
            total, *model_shape(model.config), run.offers.peak_tflops(device_name()), self.place.speaks_for_its_data
        )
        self.stopping = Stopping(run, self.meter)
        self.add_callback(self.stopping)
        if run.strategy.replicas > 1:
            self.local_steps = local_steps(self)
            self.add_callback(self.local_steps)  # after all that may wish for something
        if run.world.size > 1:
            self.meter.slow = SlowRanks(run)
        for callback in run.offers.callbacks(run, self.meter, model.config, trained):
            self.add_callback(callback)

    # ---- batches -------------------------------------------------------------------------------------------------
    def _loader(
        self, rows: Any, micro: int, accumulation: int, of: tuple[int, int], seed: int | None, size: int | None = None
    ) -> Loader:
        shape = (len(rows), micro, accumulation, *of, seed)
        supervised = None if rows.streamed else rows.supervised()
        kind = GlobalBatches
        if rows.streamed:
            kind = StreamBatches
        elif self.local_steps and seed is not None:
            kind = self.local_steps.batches()
        batches = kind(*shape, supervised, size)
        return Loader(WithFiller(rows, self.pad_token_id), batches, self.collate, self.args.dataloader_num_workers)

    def get_train_dataloader(self) -> Loader:
        args = self.args
        micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        of = self.data_rank, self.run.batch.data_parallel_size
        return self._loader(self.train_dataset, micro, accumulation, of, args.seed, self.run.batch.global_size)

    def set_initial_training_values(self, *about: Any) -> Any:
        values = super().set_initial_training_values(*about)
        return self.local_steps.epochs(*values) if self.local_steps else values

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Loader:
        return self._loader(eval_dataset, self.args.per_device_eval_batch_size, 1, self.looks_as, None)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """The micro-batches of one step, and the supervised tokens of the step over all ranks."""
        self.meter.start()
        if self.saving:
            self.saving.check()
        nonfinite.guard_of(self).begin(self)
        heartbeat.enter(heartbeat.WINDOW if self.train_dataset.streamed else heartbeat.DATA, self.state.global_step + 1)
        if self.train_dataset.streamed:
            self.train_dataset.reach(self.state.global_step * self.run.batch.global_size)
        began = time.perf_counter()
        micro_batches = [next(epoch_iterator) for _ in range(num_batches)]
        about = [batch[ABOUT] for batch in micro_batches]
        self.meter.count(about, time.perf_counter() - began)
        return [_to(batch, device) for batch in micro_batches], about[0].step_supervised

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Sum of the cross-entropy over this micro-batch's supervised tokens / num_items_in_batch.

        In training times the ranks over which the engine averages gradients. Without a cache: with one, the
        second sample of a row would see the first.
        """
        outputs = self.outputs(model, inputs, num_items_in_batch)
        heartbeat.enter(heartbeat.BACKWARD if self.model.training else heartbeat.EVALUATION)
        loss = nonfinite.spread(outputs.loss, self.engine.averaged_over) if self.model.training else outputs.loss
        return (loss, outputs) if return_outputs else loss

    def outputs(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        """A forward pass over a micro-batch, of the model or of a part of it."""
        about = inputs.get(ABOUT)
        inputs = {key: value for key, value in inputs.items() if key != ABOUT}
        known = END_TO_END.set(about and about.end_to_end)
        try:
            if self.sample_boundaries == packed_samples.MASKS and "attention_mask" not in inputs:
                inputs["attention_mask"] = packed_samples.masks(
                    self.model.config, inputs["position_ids"], self.model.dtype
                )
            return model(**inputs, use_cache=False, num_items_in_batch=num_items_in_batch)
        finally:
            END_TO_END.reset(known)  # it speaks of this pass alone: another model's would be told wrong

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        heartbeat.enter(heartbeat.FORWARD)
        self.engine.before_micro_step(self, model)
        if self.expert_balance:
            self.expert_balance.mask = inputs.get("attention_mask")
        loss = super().training_step(model, inputs, num_items_in_batch)
        nonfinite.guard_of(self).micro_losses.append(loss)
        heartbeat.enter(heartbeat.OPTIMIZER)  # under DeepSpeed it was a part of the backward pass
        return loss

    def _init_training_state(self, max_steps: int, *rest: Any) -> Any:
        trained = super()._init_training_state(max_steps, *rest)
        self.state.compute_steps(self.args, max_steps)  # the checkpoint brought the intervals of who wrote it
        return trained

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        upstream.name_first_rate(self.optimizer, self.args.learning_rate)
        return super().create_scheduler(num_training_steps, optimizer)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if self.train_dataset.streamed:
            checkpoint = Path(resume_from_checkpoint) if resume_from_checkpoint else None
            self.train_dataset.open(self.world, checkpoint, self.run.directory, ranks.gather(os.getpid())[0])
            ranks.barrier()  # the others look for windows where the host's first rank makes them
        self._purge_tensorboard()
        if resume_from_checkpoint:
            self.tokens_before = manifest.recorded(Path(resume_from_checkpoint)).get("tokens", 0)
        resharded = self.is_resharded(resume_from_checkpoint)
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, None if resharded else resume_from_checkpoint
        )
        if resharded:
            resharding.reshard(self, Path(resume_from_checkpoint))
            upstream.take_rates_of(self.lr_scheduler)
        self.engine.begin(self, resume_from_checkpoint, max_steps)
        if self.local_steps:
            self.local_steps.begin(resume_from_checkpoint)
        return prepared

    def _purge_tensorboard(self) -> None:
        """Of the steps that this run trains again, or anew, hide what an interrupted one has logged."""
        again = self.state.global_step + 1 if self.state.global_step else 0
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and self.is_world_process_zero():
                upstream.purge_tensorboard(callback, again)

    # ---- gradient norm -------------------------------------------------------------------------------------------
    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return self._norm(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """The gradient norm before clipping, for the log; None where the step is left out."""
        norm = self._norm(model, 0.0) if grad_norm is None else grad_norm
        return nonfinite.guard_of(self).judge(self, norm)

    def _norm(self, model: torch.nn.Module, max_norm: float) -> Any:
        """The norm before clipping; clips where nothing has yet."""
        if self.engine.clips_by_itself:
            return super()._get_grad_norm(model)
        return self.engine.clip(self, model, max_norm)

    # ---- watching and saving -------------------------------------------------------------------------------------
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self.meter.report())
            logs["tokens"] = self.tokens_before + self.meter.tokens_of_all
            if self.expert_balance:
                logs.update(self.expert_balance.report(self.state.global_step))
            if self.local_steps:
                self.local_steps.complete(logs)
        super().log(logs, start_time)
        nonfinite.check_held_out(logs, self)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint:
            self.engine.load_states(self, checkpoint)
            upstream.take_rates_of(self.lr_scheduler)

    def train(self, *args: Any, **options: Any) -> Any:
        try:
            return super().train(*args, **options)
        except BaseException:
            if self.saving:
                self.saving.let_finish()
            raise

    def is_resharded(self, checkpoint: str | None) -> bool:
        """Whether it is another engine's or number of ranks', so that this one cannot load it by itself."""
        if not checkpoint:
            return False
        return not compatibility.is_native(Path(checkpoint), self.run)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.is_resharded(resume_from_checkpoint):
            with upstream.any_layer_kinds():
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self.is_resharded(best := self.state.best_model_checkpoint):
            resharding.reshard(self, Path(best), moments=False)
        else:
            super()._load_best_model()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint:
            resharding.seed_other_ranks(self, Path(checkpoint))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Instead of Transformers' own: the checkpoint is whole or absent, and removing older ones comes last."""
        own = self.local_steps and self.local_steps.local_weights()
        with heartbeat.within(heartbeat.CHECKPOINT), self.meter.pause(), self.averaged_model():
            write_checkpoint.save(self, own)

    def _finalize_training(self, *args: Any) -> Any:
        if self.saving:
            with heartbeat.within(heartbeat.CHECKPOINT):
                self.saving.wait()  # the best checkpoint may be the last
        return super()._finalize_training(*args)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.save_stream(output_dir)
        self.engine.save_states(Path(output_dir))

    def save_stream(self, output_dir: str) -> None:
        """Where the data goes on, where it is a stream."""
        if self.train_dataset.streamed and self.args.should_save:
            self.train_dataset.save(Path(output_dir), self.state.global_step * self.run.batch.global_size)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.run.settings.recipe.model.use_peft:  # PEFT saves adapters alone, and nothing of where an answer ends
            self.model.generation_config.save_pretrained(output_dir or self.args.output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save in Hugging Face format. Checkpoints stay as their engine shards them; a model asked for by name is whole."""
        heartbeat.enter(heartbeat.CHECKPOINT)
        if self.local_steps and not self.local_steps.speaks and not _internal_call:
            return  # another replica saves it
        if not _internal_call:
            self.run.check_directory()
            if self.args.should_save:
                files.remove_links(Path(output_dir or self.args.output_dir))
        whole = None if _internal_call else self.engine.whole_state(self)
        if whole is None:
            super().save_model(output_dir, _internal_call)
        else:
            self._save(output_dir, state_dict=whole)
        if self.args.should_save and not _internal_call:
            folder = Path(output_dir or self.args.output_dir)
            file_modes.by_umask(*folder.glob("*.safetensors"))  # of a checkpoint, saving.py does it
            saved_model.check(self, folder)


def _to(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Tensors on the device; from pinned memory without waiting for the copy."""
    return {k: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
