"""Whether this host can do what a run asks for: devices, precision, kernels, compiler. Told before a model is built."""

import importlib.util
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..cluster import World
from ..errors import UserError, writing
from ..errors.console import counted
from ..planner.costs import calibration
from ..recipe.batch import Batch, batch_arithmetic
from ..recipe.files import read_yaml
from ..recipe.flags import Settings
from ..recipe.schema import Recipe
from ..run.directory import RECORD, Run
from ..setup import kernels
from ..strategy import Strategy, deepspeed_config
from . import optimizers


def check(settings: Settings, strategy: Strategy, world: World) -> None:
    """Hold precision, kernels and strategy against this host's device and compiler. Raises UserError."""
    import torch

    training, model = settings.recipe.training, settings.recipe.model
    broken = calibration.left_aside()  # the planner's file: no run needs it
    if broken and world.local_rank == 0:
        print(f"warning on {world.host}: {broken}; training goes on without this file", file=sys.stderr)
    gpu = torch.cuda.is_available()
    if gpu and torch.cuda.device_count() < world.local_size:
        problem = f"{counted(world.local_size, 'rank')} on this host, but {counted(torch.cuda.device_count(), 'GPU')}"
        raise UserError(
            f"host {world.host}", problem, "start one rank per GPU: --num_gpus, --nproc_per_node, num_processes"
        )
    if training.fp16 and not gpu and strategy.is_deepspeed:
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            problem = "DeepSpeed takes fp16 on a CPU with instructions for it (AVX512-FP16), which this one lacks"
            raise UserError(settings.place("fp16"), problem, "use bf16, or fp32 (neither)")
    if training.bf16 and gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name()
        raise UserError(settings.place("bf16"), f"{name} has no bf16", "use fp16, or fp32 (neither)")
    if model.attn_implementation.startswith("flash_attention") and not gpu:
        problem = f"{model.attn_implementation} needs a GPU, and this host has none"
        raise UserError(settings.place("attn_implementation"), problem, "use sdpa or eager")
    if model.attn_implementation.startswith("flash_attention") and not (training.bf16 or training.fp16):
        problem = f"{model.attn_implementation} computes in bf16 or fp16, but the recipe says fp32"
        raise UserError(settings.place("attn_implementation"), problem, "set bf16, or use sdpa")
    if model.attn_implementation.startswith("flash_attention"):
        from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

        second = model.attn_implementation.endswith("2")
        if not (is_flash_attn_2_available() if second else is_flash_attn_3_available()):
            problem = f"{model.attn_implementation} is not installed on this host"
            install = (
                "pip install flash-attn"
                if second
                else "install flash-attn-3, from hopper/ of Dao-AILab/flash-attention"
            )
            raise UserError(settings.place("attn_implementation"), problem, f"{install}, or use sdpa")
    if model.attn_implementation == "flex_attention" and not gpu:
        raise UserError(
            settings.place("attn_implementation"), "flex_attention has no backward pass on a CPU", "use sdpa or eager"
        )
    for package in training.report_to:
        if importlib.util.find_spec(package) is None:
            problem = f"{package!r} is not installed on this host"
            raise UserError(settings.place("report_to"), problem, f"pip install {package}, or remove it from report_to")
    for key, needed in (("use_peft", "peft"), ("load_in_4bit", "bitsandbytes")):
        if getattr(model, key) and importlib.util.find_spec(needed) is None:
            raise UserError(settings.place(key), f"{needed!r} is not installed on this host", f"pip install {needed}")
    optimizers.parse_arguments(training.optim, training.optim_args, settings.place("optim_args"))
    compilers = (
        [os.environ.get("CC", "gcc"), "clang"] if gpu else [os.environ.get("CXX", "g++")]
    )  # Triton's, inductor's
    if training.torch_compile and not any(map(shutil.which, compilers)):
        raise UserError(
            settings.place("torch_compile"),
            f"it compiles with {' or '.join(compilers)}, and there is none",
            "apt-get install g++, or leave torch_compile out",
        )
    if strategy.is_deepspeed:
        _check_deepspeed(strategy, gpu)


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


def micro_batch(settings: Settings, strategy: Strategy, world: World, batch: Batch, config: Any) -> tuple[int, str]:
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
    try:
        return job_of_run.largest_fit(
            recipe_here(settings),
            strategy,
            batch,
            world.size,
            world.local_size,
            config.to_dict(),
            device,
            "the model's config",
        )
    except job_of_run.NotCovered as error:
        return 1, f"{error}{cure}"
    except Exception as error:  # a run that trains does not end for an estimate's sake
        return 1, f"the formulas fail on it, {type(error).__name__}{cure}"


def _check_deepspeed(strategy: Strategy, gpu: bool) -> None:
    import ctypes.util
    import sysconfig

    assert strategy.ds_config is not None
    if deepspeed_config.is_quantised(strategy.ds_config) and not gpu:
        raise UserError(
            strategy.source,
            "ZeRO++'s quantised weights and gradients are CUDA kernels, and this host has no GPU",
            "use ds_configs/zero3_hpz.json, the part of ZeRO++ that needs none",
        )
    swaps, quantised = (
        deepspeed_config.swaps_to_nvme(strategy.ds_config),
        deepspeed_config.is_quantised(strategy.ds_config),
    )
    compiles = not gpu or swaps or quantised or "offload_optimizer" in strategy.ds_config["zero_optimization"]
    if gpu and compiles:
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is None:
            raise UserError(
                strategy.source,
                "DeepSpeed compiles kernels for this run, and there is no CUDA toolkit (nvcc)",
                "install the toolkit of torch's CUDA version, and set CUDA_HOME",
            )
    if compiles and not shutil.which("g++"):
        raise UserError(
            strategy.source, "DeepSpeed compiles kernels for this run, and there is no g++", "apt-get install g++"
        )
    if compiles and not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        raise UserError(
            strategy.source,
            "DeepSpeed compiles kernels for this run, and Python.h is missing",
            "apt-get install python3-dev",
        )
    if compiles:  # torch locks its cache also where all kernels lie in it
        folder = kernels.cache()
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    if swaps and not ctypes.util.find_library("aio"):
        raise UserError(
            strategy.source, "NVMe offload needs libaio, which this host lacks", "apt-get install libaio-dev"
        )


def batch_here(run: Run, config: Any) -> Batch:
    """run.batch, with what an "auto" micro-batch is on this rank's device: what this run began with, where it continues, or
    the planner's for a model of this `config`."""
    training, world = run.settings.recipe.training, run.world
    if training.per_device_train_batch_size != "auto":
        return run.batch
    record = run.directory / RECORD
    old = (read_yaml(record).get("run") or {}) if record.exists() and not run.settings.fresh else {}
    began = re.search(r"micro-batch (\d+)", str(old.get("batch")))
    share = run.batch.micro * run.batch.accumulation
    if began and int(began[1]) > 0 and share % int(began[1]) == 0:
        found = int(began[1]), "as this run began"
    else:
        from ..training import preflight  # not before: it brings the planner

        found = preflight.micro_batch(run.settings, run.strategy, world, run.batch, config)
    return batch_arithmetic(training, world.size, run.settings.place("global_batch_size"), *found)
