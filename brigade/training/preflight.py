"""Whether this host and this model can do what a run asks for. Told before the model is built."""

import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from .. import upstream
from ..cluster import World
from ..errors import UserError, writing
from ..errors.console import counted
from ..model import packed_samples
from ..model.location import check_beside
from ..recipe.batch import Batch, batch_arithmetic
from ..recipe.files import calibration_file, read_yaml
from ..recipe.flags import Settings
from ..recipe.schema import Recipe
from ..run.directory import RECORD, Run
from ..strategy import Strategy

Mistake = tuple[str, str, str]  # place or a recipe's key, problem, cure


def check(run: Run, config: Any) -> Batch:
    """Compare what the run asks for with this host and with the model of this `config`. Raises UserError.

    Returns run.batch, with what an "auto" micro-batch is on this rank's device: what this run began with, where it continues,
    or the planner's.
    """
    settings = run.settings
    check_host(settings, run.strategy, run.world)
    check_beside(settings, config)
    packed_samples.check(settings, config)
    if settings.recipe.training.tiled_loss or settings.recipe.training.tiled_mlp:
        from ..engines import tiled

        tiled.check(settings, config)
    if getattr(config.get_text_config(), "output_router_logits", False):
        from ..model import experts

        experts.check_loss(settings, config)
    if settings.recipe.model.use_peft:
        from ..model import adapters

        adapters.check_targets(settings, config)
    batch = batch_here(run, config)
    if run.strategy.axes:
        from ..engines import checks

        checks.check(run, config, batch)
    return batch


def check_host(settings: Settings, strategy: Strategy, world: World) -> None:
    """Compare ranks, precision, kernels and strategy with this host's devices, packages and compiler. Raises UserError."""
    import torch

    _warn_of_calibration(world)
    gpu = torch.cuda.is_available()
    if gpu and torch.cuda.device_count() < world.local_size:
        problem = f"{counted(world.local_size, 'rank')} on this host, but {counted(torch.cuda.device_count(), 'GPU')}"
        cure = "start one rank per GPU: --num_gpus, --nproc_per_node, num_processes"
        raise UserError(f"host {world.host}", problem, cure)
    for key, problem, cure in _lacking(settings, strategy, gpu):
        raise UserError(settings.place(key), problem, cure)
    if settings.recipe.training.optim_args:
        from .optimizers import parse_arguments

        parse_arguments(
            settings.recipe.training.optim, settings.recipe.training.optim_args, settings.place("optim_args")
        )
    for problem, cure in _lacking_for_deepspeed(strategy, gpu) if strategy.is_deepspeed else ():
        raise UserError(strategy.source, problem, cure)


def _warn_of_calibration(world: World) -> None:
    """The planner's file: no run needs it, so a broken one ends none."""
    file = calibration_file()
    if file and file.exists():
        from ..planner.costs import calibration

        broken = calibration.left_aside()
        if broken and world.local_rank == 0:
            print(f"warning on {world.host}: {broken}; training goes on without this file", file=sys.stderr)


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
    attention = model.attn_implementation
    if attention.startswith("flash_attention"):
        from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

        package, there = "pip install flash-attn", is_flash_attn_2_available
        if attention.endswith("3"):
            package, there = (
                "install flash-attn-3, from hopper/ of Dao-AILab/flash-attention",
                is_flash_attn_3_available,
            )
        if not gpu:
            yield "attn_implementation", f"{attention} needs a GPU, and this host has none", "use sdpa or eager"
        if not (training.bf16 or training.fp16):
            problem = f"{attention} computes in bf16 or fp16, but the recipe says fp32"
            yield "attn_implementation", problem, "set bf16, or use sdpa"
        if not there():
            yield "attn_implementation", f"{attention} is not installed on this host", f"{package}, or use sdpa"
    if attention == "flex_attention" and not gpu:
        yield "attn_implementation", "flex_attention has no backward pass on a CPU", "use sdpa or eager"
    packages: list[Mistake] = [
        ("report_to", package, ", or remove it from report_to") for package in training.report_to
    ]
    packages += [("use_peft", "peft", "")] * model.use_peft + [
        ("load_in_4bit", "bitsandbytes", "")
    ] * model.load_in_4bit
    for key, package, otherwise in packages:
        if importlib.util.find_spec(package) is None:
            yield key, f"{package!r} is not installed on this host", f"pip install {package}{otherwise}"
    # Triton's compilers, or inductor's.
    compilers = [os.environ.get("CC", "gcc"), "clang"] if gpu else [os.environ.get("CXX", "g++")]
    if training.torch_compile and not any(map(shutil.which, compilers)):
        problem = f"it compiles with {' or '.join(compilers)}, and there is none"
        yield "torch_compile", problem, "apt-get install g++, or leave torch_compile out"


def _lacking_for_deepspeed(strategy: Strategy, gpu: bool) -> Iterator[tuple[str, str]]:
    """What this host lacks for the kernels of a ds_config: problem, cure."""
    import ctypes.util
    import sysconfig

    from ..strategy.deepspeed_config import is_quantised, swaps_to_nvme

    config = strategy.ds_config or {}
    swaps, quantised = swaps_to_nvme(config), is_quantised(config)
    if quantised and not gpu:
        problem = "ZeRO++'s quantised weights and gradients are CUDA kernels, and this host has no GPU"
        yield problem, "use ds_configs/zero3_hpz.json, the part of ZeRO++ that needs none"
    if not gpu or swaps or quantised or "offload_optimizer" in config["zero_optimization"]:
        from torch.utils.cpp_extension import CUDA_HOME

        from ..setup import kernels

        compiles = "DeepSpeed compiles kernels for this run, and"
        if gpu and CUDA_HOME is None:
            cure = "install the toolkit of torch's CUDA version, and set CUDA_HOME"
            yield f"{compiles} there is no CUDA toolkit (nvcc)", cure
        if not shutil.which("g++"):
            yield f"{compiles} there is no g++", "apt-get install g++"
        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
            yield f"{compiles} Python.h is missing", "apt-get install python3-dev"
        folder = kernels.cache()  # torch locks it also where all kernels lie in it
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    if swaps and not ctypes.util.find_library("aio"):
        yield "NVMe offload needs libaio, which this host lacks", "apt-get install libaio-dev"


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


def recipe_here(settings: Settings) -> Recipe:
    """The recipe with the kernels that this host has."""
    training = settings.recipe.training.model_copy(update={"use_liger_kernel": liger(settings)[0]})
    return settings.recipe.model_copy(update={"training": training})


def batch_here(run: Run, config: Any) -> Batch:
    """As check() returns it."""
    training = run.settings.recipe.training
    if training.per_device_train_batch_size != "auto":
        return run.batch
    record = run.directory / RECORD
    old = (read_yaml(record).get("run") or {}) if record.exists() and not run.settings.fresh else {}
    began = re.search(r"micro-batch (\d+)", str(old.get("batch")))
    share = run.batch.micro * run.batch.accumulation
    if began and int(began[1]) > 0 and share % int(began[1]) == 0:
        found = int(began[1]), "as this run began"
    else:
        found = _largest_micro_batch(run, config)
    return batch_arithmetic(training, run.batch.data_parallel_size, run.settings.place("global_batch_size"), *found)


def _largest_micro_batch(run: Run, config: Any) -> tuple[int, str]:
    """(the largest micro-batch that fits this rank's GPU as the planner counts, in words why); 1 where it cannot tell."""
    import torch

    cure = "; set per_device_train_batch_size"
    if not torch.cuda.is_available():
        return 1, f"no GPU that the planner knows{cure}"
    from ..planner.choice import job_of_run
    from ..planner.costs import hardware

    device = hardware.gpu_of_device(name := torch.cuda.get_device_name())
    if device is None:
        return 1, f"no figures of {name}{cure}"
    recipe, sizes = recipe_here(run.settings), (run.world.size, run.world.local_size)
    try:
        return job_of_run.largest_fit(
            recipe, run.strategy, run.batch, *sizes, config.to_dict(), device, "the model's config"
        )
    except job_of_run.NotCovered as error:
        return 1, f"{error}{cure}"
    except Exception as error:  # a run that trains does not end for an estimate's sake
        return 1, f"the formulas fail on it, {type(error).__name__}{cure}"
