"""From a run's settings and strategy to Transformers' TrainingArguments: the one place that sets the engines' options."""

import io
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cluster import World
from ..data.sampling import GlobalBatches
from ..distributed import ranks
from ..errors import UserError
from ..errors.console import counted
from ..model.location import load_config
from ..model.sizes import half_or_full, largest_parameter
from ..recipe.batch import length
from ..recipe.files import DEFAULT_RECIPE
from ..recipe.flags import Settings
from ..run.directory import RECORD, SUCCESS, Run
from ..setup import kernels
from ..strategy import Strategy, accelerate_config, deepspeed_config
from . import optimizers, preflight

if TYPE_CHECKING:
    import torch


# How lines and warnings begin that tell a user nothing, at these versions, and why.
NOISE = {
    "DeepSpeed deepspeed.ops.": "a kernel that was built, or found built; where building fails, it raises",
}


def prepare_environment(world: World, strategy: Strategy) -> None:
    """What the engines read from the environment, set once and before any of them is imported.

    - ninja stands beside the interpreter; over ssh and without an activated environment that is not on PATH, and
      without it every DeepSpeed build dies.
    - DeepSpeed asks for MPI when a lone process names no rank; FSDP and ZeRO on one process need a group of one.
    - accelerate's own variables were read by strategy.choose.
    - A lock in the cache of compiled kernels that a killed run left behind would hold this one up for ever.
    """
    import torch

    accelerate_config.clear_environment()
    kernels.cache()
    kernels.guard_locks()
    _forget_earlier_run()
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    # Else torch takes every core for every rank. accelerate looks at the variable.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_size))
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    if world.launcher == "python" and strategy.kind != "single":
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(ranks.free_port()))  # fmt: skip
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns, whatever the strategy: accelerate imports it
    _silence(world)


def _forget_earlier_run() -> None:
    """What an earlier run of this process left in the engines' modules: a ZeRO-3 configuration would shard whatever is
    built from now on, and hpZ's groups may be made only once."""
    if "transformers.integrations.deepspeed" in sys.modules:
        sys.modules["transformers.integrations.deepspeed"].unset_hf_deepspeed_config()
    if "deepspeed.utils.groups" in sys.modules:
        sys.modules["deepspeed.utils.groups"]._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # type: ignore[attr-defined]


def _silence(world: World) -> None:
    """Hide what is known to be noise, and no more. What other ranks than the first print, log or warn of has their number."""
    import logging
    import warnings

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    for beginning in NOISE:
        warnings.filterwarnings("ignore", re.escape(beginning))
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    # It warns that its own accumulation setting, which Trainer keeps at 1, is not DeepSpeed's.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    if world.speaks:
        return
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    mark = f"rank {world.rank}: "
    if not isinstance(sys.stdout, _Marked):
        sys.stdout = _Marked(sys.stdout, mark)
    if not (formatted := warnings.formatwarning)("", UserWarning, "", 0).startswith(mark):  # nor by an earlier run
        warnings.formatwarning = lambda *args, **options: mark + formatted(*args, **options)
        record = logging.getLogRecordFactory()

        def marked(*args: Any, **options: Any) -> logging.LogRecord:
            one = record(*args, **options)
            one.msg = f"{mark}{one.msg}"
            return one

        logging.setLogRecordFactory(marked)


class _Marked(io.TextIOBase):
    """Writes whole lines to `stream`, each after a mark, but for NOISE and empty ones."""

    def __init__(self, stream: Any, mark: str) -> None:
        self.stream, self.mark, self.begun = stream, mark, ""

    def write(self, text: str) -> int:
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            if line.strip() and not line.startswith(tuple(NOISE)):
                self.stream.write(f"{self.mark}{line}\n")
        return len(text)

    def flush(self) -> None:
        if self.begun:
            self.write("\n")
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()


def load_dtype(settings: Settings, strategy: Strategy) -> "torch.dtype":
    """The precision to load weights in. DeepSpeed keeps its own fp32 master copy and wants half-precision weights;
    DDP and FSDP2 train fp32 weights and cast for the computation (autocast, MixedPrecisionPolicy). Weights that stay
    frozen under adapters need no fp32 anywhere."""
    import torch

    if not strategy.is_deepspeed and not settings.recipe.model.use_peft:
        return torch.float32
    return half_or_full(settings)


def _steps(run: Run, train_samples: int) -> float:
    training, batch = run.settings.recipe.training, run.batch
    if training.max_steps > 0:
        return training.max_steps
    epoch = GlobalBatches(train_samples, batch.micro, batch.accumulation, 0, batch.data_parallel_size).steps
    return epoch * training.num_train_epochs


def _warmup(run: Run, steps: float) -> int:
    """Steps of warm-up of a run of so many steps: a share is of those that our batches make, not of Trainer's estimate."""
    wanted = run.settings.recipe.training.warmup_steps
    return round(wanted * steps) if wanted < 1 else int(wanted)


def _rate(run: Run, steps: float, step: int) -> float:
    """The learning rate of the 1-based `step` of a run of so many steps."""
    import torch
    from transformers import get_scheduler

    training, total = run.settings.recipe.training, math.ceil(steps)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=run.batch.learning_rate)
    how = training.lr_scheduler_type, optimizer, _warmup(run, steps), total, training.lr_scheduler_kwargs
    return run.batch.learning_rate * get_scheduler(*how).lr_lambdas[0](step - 1)


def check_steps(run: Run, train_samples: int, checkpoint: Path | None) -> None:
    """Raises UserError where the learning rate would never be reached, or where a run of another length than the one that
    wrote the checkpoint cannot go on from it. Says in run.lengthened what the learning rate does where it can.

    A run can be lengthened at its end: its order of samples does not depend on its length, but its learning rate may, and
    midway a run of no length would have had the rates of two.
    """
    settings, real = run.settings, _steps(run, train_samples)
    training, steps = settings.recipe.training, math.ceil(real)
    place = settings.place(length(training.model_dump())[0])
    # A trial of the recipe that nobody had to name, and the repetition of a run, go on as they are: the table says it.
    known = settings.recipe_path.name == RECORD or settings.recipe_path.resolve() == DEFAULT_RECIPE
    if training.warmup_steps > steps and not (known and "warmup_steps" not in settings.sources):
        problem = f"warmup_steps is {training.warmup_steps:g}, but the run has {counted(steps, 'step')} ({place}): "
        problem += "it would never reach learning_rate"
        cure = f"for a short trial --warmup_steps 0; else {steps} at most, or a share of all steps, e.g. 0.05"
        raise UserError(settings.place("warmup_steps"), problem, cure)
    further = (
        f"train its model further as a run of its own: --model_name_or_path {run.directory} and another --output_dir"
    )
    success = run.resized and (run.directory / SUCCESS).exists()
    if success and checkpoint is None:
        raise UserError(
            str(run.directory), "the finished run kept no checkpoint (save_steps), so it cannot be lengthened", further
        )
    if checkpoint is None:
        return
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    done, before = state["global_step"], state["max_steps"]
    if steps == before:
        return
    if done < before:
        problem = f"{checkpoint.name} is at step {done} of {before}, and only a run that had all its steps can be given {steps}"
        cure = (
            further if success else f"let it end first, with the {before} steps that its run.yaml has; then lengthen it"
        )
        raise UserError(place, problem, cure)
    if steps <= done:
        cure = f"a number above {done} lengthens it; for a shorter run give another --output_dir"
        raise UserError(place, f"it asks for {steps} steps, and the run in {run.directory} has {done} already", cure)
    if not any(_rate(run, real, step) for step in range(done + 1, steps + 1)):
        cure = f"{further}, with a schedule of its own"
        raise UserError(settings.place("lr_scheduler_type"), f"from step {done} on its learning rate is 0", cure)
    old, new = _rate(run, before, done), _rate(run, real, done + 1)
    run.lengthened = (
        f"from {before} to {steps} steps; the learning rate is from here on that of {training.lr_scheduler_type} over {steps} "
        f"steps: {new:.3g} at step {done + 1}, after {old:.3g} at step {done}"
    )


def training_arguments(run: Run, train_samples: int, resuming: bool) -> Any:
    """TrainingArguments for a run. After this call ZeRO-3 models load shard by shard."""
    import torch
    from transformers import TrainingArguments
    from transformers.utils import logging as transformers_logging

    settings, strategy, batch, world, output_dir = run.settings, run.strategy, run.batch, run.world, run.directory
    training = settings.recipe.training
    cpu = not torch.cuda.is_available()
    transformers_logging.disable_progress_bar()  # ours is watch.progress
    transformers_logging.set_verbosity_error()
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(output_dir / "tensorboard")
    options: dict[str, Any] = {
        key: getattr(training, key)
        for key in ("num_train_epochs", "max_steps", "lr_scheduler_type", "lr_scheduler_kwargs",
                    "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "fp16",
                    "seed", "logging_steps", "save_total_limit", "report_to")
    }  # fmt: skip
    evaluated = training.per_device_eval_batch_size
    options["per_device_eval_batch_size"] = batch.micro if evaluated == "auto" else evaluated
    workers = training.dataloader_num_workers
    options["dataloader_num_workers"] = workers if workers != "auto" else 0 if cpu else 2
    options["use_liger_kernel"] = preflight.liger(settings)[0]
    if training.optim not in optimizers.NAMES:
        options.update(optim=training.optim, optim_args=training.optim_args)
    if training.activation_checkpointing and strategy.is_fsdp:
        options["fsdp_config"] = {"activation_checkpointing": True}
    elif training.activation_checkpointing:
        # The reentrant form finds no input that requires a gradient where embeddings are frozen, and breaks DDP's hooks.
        options.update(activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": False})
    options |= {"save_strategy": "steps", "save_steps": training.save_steps} if training.save_steps else {
        "save_strategy": "no"}  # fmt: skip
    if training.eval_steps:
        # The metric alone keeps the best checkpoint from rotation.
        options |= {"eval_strategy": "steps", "eval_steps": training.eval_steps, "metric_for_best_model": "eval_loss",
                    "load_best_model_at_end": training.load_best_model_at_end,
                    "restore_callback_states_from_checkpoint": True}  # fmt: skip
    if strategy.is_deepspeed:
        import deepspeed as engine

        # Transformers leaves this out on a CPU, and DeepSpeed then believes that the world size is 1.
        engine.init_distributed(dist_backend="gloo" if cpu else "nccl", auto_mpi_discovery=False)
        config = strategy.ds_config or {}
        nvme = deepspeed_config.swaps_to_nvme(config)
        shard = -(-largest_parameter(load_config(settings)) // world.size) if nvme else 0
        options["deepspeed"] = deepspeed_config.fill(
            config, world.local_size, _nvme(settings, output_dir), training.optim, shard
        )
    if strategy.is_fsdp:
        # Sharded checkpoints: a full one would gather the model on rank 0 at every save.
        # And the first rank's weights are sent to the others (models.py: _are_sent): eight copies of an 8B model in fp32
        # would take 260 GB of host memory. Transformers looks for this variable beside the option.
        defaults = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT",
                    "cpu_ram_efficient_loading": True}  # fmt: skip
        options.update(fsdp=True, fsdp_config=defaults | strategy.fsdp | options.get("fsdp_config", {}))
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        # And gradients are reduced in every micro-step: else each rank keeps them whole until the last, 4 bytes per
        # parameter of the unsharded model (docs/states.md).
        options["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if strategy.kind == "hsdp":
        from accelerate import ParallelismConfig

        mesh = {"dp_replicate_size": strategy.replicate, "dp_shard_size": strategy.shard}
        options["parallelism_config"] = ParallelismConfig(**mesh)
    options["warmup_steps"] = _warmup(run, _steps(run, train_samples))
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        per_device_train_batch_size=batch.micro,
        gradient_accumulation_steps=batch.accumulation,
        learning_rate=batch.learning_rate,
        use_cpu=cpu,
        ddp_backend="gloo" if cpu and world.launcher != "python" else None,
        # PowerSGD's memory belongs to buckets, and only with True are they the same in every process (compression.py).
        ddp_find_unused_parameters=training.ddp_comm_hook == "power_sgd",
        eval_on_start=not resuming,
        disable_tqdm=True,  # watch.progress shows it
        save_on_each_node=not run.shared,
        logging_nan_inf_filter=False,  # on by default, it logs a NaN loss as 0.0
        remove_unused_columns=False,
        log_level="error",
        log_level_replica="error",
        **options,
    )
    # The device is settled by now. One process takes one device: Trainer would wrap it in nn.DataParallel.
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    if cpu and strategy.is_fsdp:
        # AcceleratorState turns to FSDP only from a type of its GPU list, and trains as DDP otherwise, silently.
        from accelerate.state import DistributedType, PartialState

        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return arguments


def _nvme(settings: Settings, output_dir: Path) -> Path:
    named = settings.recipe.cluster.nvme_path
    return Path(named).expanduser() if named else output_dir.resolve() / "nvme_offload"
