"""Whether this host and this model can do what a run asks for. Told before the model is built."""

import importlib.util
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...errors.console import counted
from .. import upstream
from ..cluster import World
from ..distributed import ranks
from ..model import adapters, attention, attention_needs, experts, layer_classes, packed_samples
from ..model.location import check_beside
from ..parallel import checks, tiled
from ..recipe.batch import Batch, length
from ..recipe.files import DEFAULT_RECIPE
from ..recipe.flags import Settings
from ..recipe.schedules import check_last_rate
from ..recipe.schema import BY_PROOF
from ..run.directory import RECORD, SUCCESS, Run
from ..strategy import Strategy
from ..strategy.replicas import check_length
from . import deepspeed_needs, lengthening, micro_batch
from .optimizers import parse_arguments
from .schedule import check_phases, run_length

Mistake = tuple[str, str, str]  # place or a recipe's key, problem, cure


def check(run: Run, config: Any) -> None:
    """Settle what the run computes with, and compare what it asks for with each host and with the model of this `config`. A
    collective: a UserError that one rank finds ends all of them.

    Sets run.kernels, and run.batch with what an "auto" micro-batch is on these devices, the same on all ranks.
    """
    _settle_kernels(run, config)
    with ranks.agreed(run.world):
        batch = _check(run, config)
        training = run.settings.recipe.training
        run.kernels = {"attention": attention.choose(run.settings, config)[0]}
        run.kernels |= {key: getattr(training, key) for key in BY_PROOF} | {"use_liger_kernel": liger(run.settings)[0]}
    batches = [Batch(**values) for values in ranks.gather(vars(batch))]
    run.batch = min(batches, key=lambda batch: batch.micro)  # GPUs may differ


def _check(run: Run, config: Any) -> Batch:
    """run.batch, with what an "auto" micro-batch is on this rank's device: what this run began with, where it continues, or the
    planner's. Raises UserError."""
    settings = run.settings
    check_last_rate(settings.recipe.training, run.batch.learning_rate, settings.place)
    check_host(settings, run.strategy, run.world)
    check_beside(settings, config)
    layer_classes.check(settings, config, run.strategy)
    packed_samples.check(settings, config)
    if settings.recipe.training.tiled_loss or settings.recipe.training.tiled_mlp:
        tiled.check(settings, config)
    if getattr(config.get_text_config(), "output_router_logits", False):
        experts.check_loss(settings, config)
    if settings.recipe.model.use_peft:
        adapters.check_targets(settings, config)
    batch = run.batch
    if settings.recipe.training.per_device_train_batch_size == "auto":
        batch = micro_batch.batch_here(run, config, liger(settings)[0])
    if run.strategy.axes:
        checks.check(run, config, batch)
    return batch


def _settle_kernels(run: Run, config: Any) -> None:
    """What `auto` takes on this run's GPUs: what is proven on all of them (docs/kernels.md). Every rank calls it."""
    import torch

    if any(ranks.gather(torch.cuda.is_available())):  # a run on a CPU proves nothing
        run.offers.settle_kernels(run, config, _compiler(gpu=True))


def _compiler(gpu: bool) -> bool:
    """Whether this host has Triton's compiler, or inductor's."""
    compilers = [os.environ.get("CC", "gcc"), "clang"] if gpu else [os.environ.get("CXX", "g++")]
    return any(map(shutil.which, compilers))


def check_host(settings: Settings, strategy: Strategy, world: World) -> None:
    """Compare ranks, precision, kernels and strategy with this host's devices, packages and compiler. Raises UserError."""
    import torch

    gpu = torch.cuda.is_available()
    if gpu and torch.cuda.device_count() < world.local_size:
        problem = f"{counted(world.local_size, 'rank')} on this host, but {counted(torch.cuda.device_count(), 'GPU')}"
        cure = "start one rank per GPU: --num_gpus, --nproc_per_node, num_processes"
        raise UserError(f"host {world.host}", problem, cure, "host")
    for key, problem, cure in _lacking(settings, strategy, gpu):
        raise UserError(settings.place(key), problem, cure, "host")
    if settings.recipe.training.optim_args:
        parse_arguments(
            settings.recipe.training.optim, settings.recipe.training.optim_args, settings.place("optim_args")
        )
    if strategy.is_deepspeed:
        for problem, cure in deepspeed_needs.lacking(strategy, gpu):
            raise UserError(strategy.source, problem, cure, "host")


def _lacking(settings: Settings, strategy: Strategy, gpu: bool) -> Iterator[Mistake]:
    """What this host lacks for a recipe: key, problem, cure."""
    import torch

    training, model = settings.recipe.training, settings.recipe.model
    if training.fp16 and not gpu and strategy.is_deepspeed:
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            problem = "DeepSpeed takes fp16 on a CPU with instructions for it (AVX512-FP16), which this one lacks"
            yield "fp16", problem, "use bf16, or fp32 (neither)"
    if training.bf16 and gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        yield "bf16", f"{torch.cuda.get_device_name()} has no bf16", "use fp16, or fp32 (neither)"
    if model.attn_implementation.startswith("fl"):  # flash_attention_2 and 3, flex_attention
        yield from attention_needs.lacking(settings, gpu)
    packages: list[Mistake] = [
        ("report_to", package, ", or remove it from report_to") for package in training.report_to
    ]
    packages += [("use_peft", "peft", "")] * model.use_peft + [
        ("load_in_4bit", "bitsandbytes", "")
    ] * model.load_in_4bit
    for key, package, otherwise in packages:
        if importlib.util.find_spec(package) is None:
            yield key, f"{package!r} is not installed on this host", f"pip install {package}{otherwise}"
    if training.torch_compile and not _compiler(gpu):
        names = f"{os.environ.get('CC', 'gcc')} or clang" if gpu else os.environ.get("CXX", "g++")
        problem = f"it compiles with {names}, and there is none"
        yield "torch_compile", problem, "apt-get install g++, or leave torch_compile out"


def check_steps(run: Run, train_samples: int, checkpoint: Path | None) -> None:
    """Raises UserError where the learning rate would never be reached, or where a run of another length than the one that
    wrote the checkpoint cannot go on from it (lengthening.py)."""
    settings, in_parts = run.settings, run_length(run, train_samples)
    training, steps = settings.recipe.training, math.ceil(in_parts)
    place = settings.place(length(training.model_dump())[0])
    # A trial of the recipe that nobody had to name, and the repetition of a run, go on as they are: the table says it.
    known = settings.recipe_path.name == RECORD or settings.recipe_path.resolve() == DEFAULT_RECIPE
    if training.warmup_steps > steps and not (known and "warmup_steps" not in settings.sources):
        problem = f"warmup_steps is {training.warmup_steps:g}, but the run has {counted(steps, 'step')} ({place}): "
        problem += "it would never reach learning_rate"
        cure = f"for a short trial --warmup_steps 0; else {steps} at most, or a share of all steps, e.g. 0.05"
        raise UserError(settings.place("warmup_steps"), problem, cure)
    check_phases(run, in_parts)
    if training.sync_every:
        check_length(settings, steps, -(-train_samples // run.batch.global_size))
    if checkpoint or (run.resized and (run.directory / SUCCESS).exists()):
        lengthening.check(run, in_parts, checkpoint, place)


def quick_imports(settings: Settings) -> AbstractContextManager[None]:
    """Where the Trainer is imported."""
    bitsandbytes = settings.recipe.model.load_in_4bit or "8bit" in settings.recipe.training.optim
    return upstream.quick_imports(bitsandbytes or "paged" in settings.recipe.training.optim)


def liger(settings: Settings) -> tuple[bool, str]:
    """Whether Liger's kernels are used, and if they were asked for and are not, why."""
    import torch

    if not settings.recipe.training.use_liger_kernel:
        return False, ""
    if not torch.cuda.is_available():
        return False, "off: its Triton kernels need a GPU"
    if importlib.util.find_spec("liger_kernel") is None:
        return False, "off: pip install liger-kernel"
    return True, ""
