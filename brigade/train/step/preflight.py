"""Checks, before the model is built, whether this host and this model can do what a run asks for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...errors import UserError
from ...errors.console import counted
from .. import upstream
from ..distributed import devices, ranks
from ..engines import deepspeed_needs
from ..engines.kernels import has_compiler
from ..host.cluster import World
from ..loss import supervised_loss, tiled
from ..loss.objective_checks import check as check_objective
from ..model import adapters, attention, experts, packed_samples, parts
from ..model.location import check_beside
from ..model.named import lacking_packages
from ..model.sizes import empty_model
from ..recipe.batch import length
from ..recipe.files import DEFAULT_RECIPE
from ..recipe.program import check_code
from ..recipe.schedules import check_last_rate
from ..recipe.settings import Settings
from ..run.directory import RECORD, Run
from ..strategy import Strategy, refuse
from ..strategy.accelerate_config import LAYERS, layer_classes
from ..strategy.replicas import check_length
from . import answer_scores, task_loading
from .optimizers import parse_arguments
from .schedule import check_phases, run_length

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, TrainerCallback

Mistake = tuple[str, str, str]  # place or a recipe's key, problem, cure


def check_run(run: Run, config: PreTrainedConfig) -> None:
    """Compare what a run asks for with the model of this `config`. Raise UserError."""
    settings = run.settings
    _check_kernels(settings)
    check_last_rate(settings.recipe.training, run.batch.learning_rate, settings.place)
    check_beside(settings, config)
    check_routers(settings, run.strategy, config)
    if settings.recipe.model.use_peft:
        adapters.check_targets(settings, config)
    check_objective(run, config)
    check_strategy(run, config)
    fails = run.offers.fails_to_load(run, config)
    if fails:
        raise UserError(f"host {run.world.host}", *fails, "host")


def check_routers(settings: Settings, strategy: Strategy, config: PreTrainedConfig) -> None:
    """Raise UserError where routers cannot have the loss that the recipe or config.json asks for, nor biases their updates."""
    if experts.router_loss_coef(settings, config):
        refuse(strategy, settings, "router_loss")
        experts.check_router_loss(settings, config, strategy.axes.stages)
    if settings.recipe.training.router_bias_update_rate:
        experts.check_router_bias(settings, config, strategy.kind, strategy.axes.stages)


def check_strategy(run: Run, config: PreTrainedConfig) -> None:
    """Compare the model of this `config` with how its run is divided and computed. Raise UserError. It builds no model."""
    settings = run.settings
    if getattr(config.get_text_config(), "altup_num_inputs", 0):
        _check_altup(run.strategy)
    if run.strategy.kind == "ddp" and getattr(config.get_text_config(), "compress_rates", None):
        problem = (
            "its compressors get no gradient from sequences that are shorter than what they compress, as DDP demands"
        )
        raise UserError(run.strategy.source, problem, "use FSDP2 or ZeRO")
    check_layer_classes(settings, config, run.strategy)
    packed_samples.check(settings, config, run.kernels.attention)
    supervised_loss.check(settings, config)
    answer_scores.check(settings)
    if settings.recipe.training.loss_tiles or settings.recipe.training.tiled_mlp:
        tiled.check(settings, config)
    if run.strategy.axes:
        check_axes(run, config)


def _check_altup(strategy: Strategy) -> None:
    """Raise UserError where Gemma 3n's alternating updates (Transformers' Gemma3nTextAltUp) do not train."""
    if strategy.kind == "zero3":
        problem = (
            "layers of Gemma 3n read weights outside of the modules for which ZeRO-3 gathers them (correction_coefs)"
        )
        raise UserError(strategy.source, problem, "use FSDP2 or ZeRO-2")
    if strategy.axes.sequence > 1:
        problem = "gradients of Gemma 3n are not finite where ranks divide its sequences"
        raise UserError(strategy.place("sequence"), problem, "remove the key: use FSDP2 without it")


def check_host(settings: Settings, strategy: Strategy, world: World) -> None:
    """Compare ranks, precision, kernels and strategy with this host's devices, packages and compiler. Raise UserError."""
    import torch

    check_code(settings)
    gpu = torch.cuda.is_available()
    if gpu:
        _check_gpu(world)
    if settings.recipe.training.eval_tasks:
        task_loading.check_package(settings.place("eval_tasks"))
    for key, problem, cure in _lacking(settings, strategy, gpu):
        raise UserError(settings.place(key), problem, cure, "host")
    if strategy.is_deepspeed:
        if gpu and os.environ.get("DS_ACCELERATOR") == "cpu":  # ZeRO-3 would gather weights there, for samples on a GPU
            problem = "torch is on this host's GPUs, but DeepSpeed is told not to be: DS_ACCELERATOR=cpu"
            raise UserError(f"host {world.host}", problem, "unset it; CUDA_VISIBLE_DEVICES= trains on the CPU", "host")
        for problem, cure in deepspeed_needs.lacking(strategy, gpu):
            raise UserError(strategy.source, problem, cure, "host")


def _check_gpu(world: World) -> None:
    """Raise UserError where this rank has no GPU, or one for which torch has no code."""
    import torch

    number = devices.index(world)
    if number is None:
        raise _too_few_gpus(world)
    lacking = devices.without_code(number)
    if lacking:
        place = f"host {world.host}, GPU {number} ({torch.cuda.get_device_name(number)})"
        raise UserError(place, *lacking, "host")


def check_gpus_differ(world: World) -> None:
    """Raise UserError where two ranks have the same GPU. A collective."""
    import torch

    with ranks.agreed(world):  # a GPU that is lost, or held by another process, does not tell
        own = devices.identity(world)
    gpus = ranks.gather(own)
    with ranks.agreed(world):
        same = [rank for rank, gpu in enumerate(gpus) if gpu and gpu == own]
        if own and len(same) > 1:
            if max(devices.count_by_driver(), torch.cuda.device_count()) == 1:
                raise _too_few_gpus(world)
            problem = f"ranks {', '.join(map(str, same))} use the same GPU (UUID {own[2] or 'unknown'})"
            cure = "let all ranks of a host see all of its GPUs, each with its LOCAL_RANK, or one each: srun --gpus-per-task=1"
            raise UserError(f"host {world.host}", problem, cure, "host")


def _too_few_gpus(world: World) -> UserError:
    import torch

    problem = f"{counted(world.local_size, 'rank')} on this host, but {counted(torch.cuda.device_count(), 'GPU')}"
    cure = "start one rank per GPU: --num_gpus, --nproc_per_node, num_processes"
    return UserError(f"host {world.host}", problem, cure, "host")


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
        yield from attention.lacking(settings, gpu)
    yield from lacking_packages(settings)


def _check_kernels(settings: Settings) -> None:
    """Raise UserError where the optimizer takes no such arguments, or nothing here compiles layers: the recipe's, or proven."""
    import torch

    training, gpu = settings.recipe.training, torch.cuda.is_available()
    if training.optim_args:
        parse_arguments(training.optim, training.optim_args, settings.place("optim_args"))
    if training.torch_compile and not has_compiler(gpu):
        names = f"{os.environ.get('CC', 'gcc')} or clang" if gpu else os.environ.get("CXX", "g++")
        problem = f"it compiles with {names}, and there is none"
        cure = "apt-get install g++, or leave torch_compile out"
        raise UserError(settings.place("torch_compile"), problem, cure, "host")


def check_callbacks(callbacks: tuple[TrainerCallback, ...]) -> None:
    """Raise UserError for callbacks that a caller from Python passes and no run can support."""
    if any(kind.__name__ == "EarlyStoppingCallback" for callback in callbacks for kind in type(callback).__mro__):
        problem = "it asks Transformers for the best checkpoint, which a run keeps by itself"
        cure = "leave it out, and set early_stopping_patience in the recipe"
        raise UserError("callbacks: EarlyStoppingCallback", problem, cure)


def check_steps(run: Run, train_samples: int) -> None:
    """Raise UserError where the learning rate would never be reached, where the phases of its schedule do not fit the run, or
    where replicas would never meet."""
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


def check_layer_classes(settings: Settings, config: PreTrainedConfig, strategy: Strategy) -> None:
    """Raise UserError where the strategy names a class that no module of the model has: Accelerate looks for it only once the
    weights are loaded (utils/fsdp_utils.py: fsdp2_prepare_auto_wrap_policy)."""
    named = layer_classes(strategy.fsdp)
    if not named:
        return
    model = empty_model(settings, config)
    classes = {type(module).__name__ for module in model.modules()}
    own = sorted(upstream.layer_classes(model))
    for name in named:
        if name not in classes:
            problem = f"{type(model).__name__} has no layer of class {name!r}"
            cure = f"leave the line out; the model's own layers are then taken: {', '.join(own) or 'it names none'}"
            raise UserError(f"{strategy.source}: fsdp_config.{LAYERS}", problem, cure)


def check_axes(run: Run, config: PreTrainedConfig) -> None:
    """Raise UserError for heads, layers or experts that an axis cannot divide, and for models that it has no way to divide."""
    settings, strategy = run.settings, run.strategy
    axes = strategy.axes
    if axes.tensor > 1:
        from ..engines.parallel import tensor

        besides = experts.plan(config) if axes.experts > 1 else ()
        why = parts.why_undivided(config) if settings.recipe.data.images else ""
        if why:
            problem = f"{type(config).__name__} cannot be divided beside its tower: {why}"
            raise UserError(strategy.place("tensor"), problem, tensor.CURE)
        model, shards = settings.recipe.model, strategy.shards(run.world.part(strategy.replicas).size)
        mistake = tensor.check(config, axes.tensor, besides, model.load_in_4bit, shards, model.trust_remote_code)
        if mistake:
            raise UserError(strategy.place("tensor"), *mistake)
    if axes.sequence > 1:
        from ..engines.parallel import sequence_checks

        ranks = run.world.part(strategy.replicas).size // (axes.tensor * axes.stages)
        how = run.kernels.attention, run.kernels.why
        sequence_checks.check(settings, config, how, axes.sequence, strategy.place("sequence"), axes.tensor, ranks)
    if axes.experts > 1:
        in_whole = strategy.kind == "ddp" or axes.stages > 1
        ranks = axes.tensor if in_whole else run.world.size // strategy.replicate
        experts.check(settings, config, axes.experts, ranks, run.world.size, strategy.place("experts"))
    if axes.stages > 1:
        from ..engines.parallel import pipeline_rules

        pipeline_rules.check(run, config, run.batch)
