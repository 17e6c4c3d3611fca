"""A rehearsal: any recipe on the machine at hand, with its own architecture, strategy and code path, but tiny shapes.

It trains, saves, is interrupted, resumes, and shows by the bytes that each rank holds that the states are sharded.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ...errors import UserError
from ...errors.console import OF_LOGS, console, counted
from ...errors.tables import Fields
from ..data.builtin import BUILT_IN, TOKENIZER, write_preferences
from ..distributed import ranks
from ..host.cluster import World
from ..model.config_json import read_config
from ..model.location import check_beside, config_beside, load_config, location
from ..model.tiny import shrink, with_short_spans
from ..recipe import remote_code
from ..recipe.files import REPOSITORY
from ..recipe.model_section import ModelSection
from ..recipe.objectives import ADAPTERS_OFF, ANSWERS, MODEL, objective_of
from ..recipe.program import RUNNER, STORY, check_functions, permission, started_as
from ..recipe.settings import Settings
from ..run.directory import REHEARSAL
from ..run.success import SUCCESS
from ..strategy import Strategy, axis_rules, choose
from ..strategy.axis_keys import with_axes
from ..strategy.state_bytes import cut_parameters, model_states
from ..strategy.unread import without_unread

if TYPE_CHECKING:
    from ..model.per_layer import Config
    from ..watch.measured_states import States
    from .context import TrainingContext


PHASES = ("num_decay_steps", "num_stable_steps")  # of a schedule, longer than a rehearsal
STEPS, SAVE_STEPS, SAMPLES = 6, 3, 50
PARTS = ("parameters", "gradients", "optimizer")
PREFERENCES, TEACHER = "preferences.jsonl", "teacher"  # in a rehearsal's folder, where the recipe learns of them


def rehearse(settings: Settings, world: World, main: Callable[..., TrainingContext]) -> None:
    """Rehearse `settings` on the ranks at hand, or on fresh ones when nothing launched this process. main: train.main

    Raise SystemExit: 2 for a user's mistake, 1 when the rehearsal shows a fault.
    """
    with ranks.agreed(world):
        if settings.recipe.data.images:
            problem = "a rehearsal makes its own model and rows, and these have no images"
            raise UserError("flag --rehearse", problem, "train recipes/tiny-vision/full.yaml on these ranks instead")
        check_functions(settings)
        strategy = with_small_axes(choose(settings, world))
    groups = strategy.replicas > 1 and strategy.replicate > 1  # HSDP's, which are replicas
    axes, hsdp = strategy.axes, strategy.kind == "hsdp" or groups
    if world.launcher == "python":
        # Each axis over two ranks, and two of them with different rows.
        raise SystemExit(_launch(min(8, (4 if hsdp else 2) * axes.unit), settings))
    with ranks.agreed(world):
        mistake = axis_rules.problem(axes, world.size)
        if mistake:
            raise UserError("flag --rehearse", *mistake)
        size = axes.data(world.size)
        if world.size < 2 or (hsdp and (size < 4 or size % 2)):
            problem = f"{strategy.label} cannot shard over {counted(world.size, 'rank')}"
            cure = f"start {(4 if hsdp else 2) * axes.model} ranks, or none: it then starts its own"
            raise UserError("flag --rehearse", problem, cure)
        if hsdp or strategy.shard > 1:
            replicate = 2 if hsdp else 1
            strategy = replace(strategy, replicate=replicate, shard=size // replicate)
        folder = settings.directory(strategy.name).parent
        config, source = model_config(settings)
        # shorter than a rehearsal's rows
        config = with_short_spans(shrink(config, axes.tensor, max(2, axes.every_stage)))
    ranks.start(world)
    if world.is_main_rank:
        model = f"a tiny {config.get('model_type')}, after {source}"
        ranks_there = counted(world.size, "rank")
        print(f"Rehearsing {settings.recipe_path} under {strategy.label} on {ranks_there}: {model}.", flush=True)
        _prepare(settings, strategy, folder, config, world)
    ranks.barrier()
    if world.local_rank == 0 and not (folder / REHEARSAL).exists():  # hosts that share no output directory
        _prepare(settings, strategy, folder, config, world)
    ranks.barrier()

    from ..watch.measured_states import StateBytes, States

    states = StateBytes()
    command = ["--recipe", str(folder / REHEARSAL), "--output_dir", str(folder / "run"), *permission(settings)]
    first = _losses(main(command, callbacks=(states,)))
    ranks.whole_again()
    if world.is_main_rank:
        _interrupt(folder / "run")
        print(f"Interrupted after checkpoint-{SAVE_STEPS}; the same command again:")
    ranks.barrier()
    second = _losses(main(command))
    held = [States(**values) for values in ranks.gather(vars(states.states))]
    if groups:
        strategy = replace(strategy, replicate=1)  # of one group, as `held`
    ranks.whole_again()
    with ranks.agreed(world):
        _judge(strategy, first, second, held, settings.recipe.training.optim, settings.recipe.model.use_peft)
    if world.is_main_rank:
        _report(strategy, held)


def _prepare(settings: Settings, strategy: Strategy, folder: Path, config: Config, world: World) -> None:
    """Write the tiny model's config and the recipe. An earlier rehearsal's folder is of no use, and is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(config, indent=2))
    rows = objective_of(settings.recipe.training).rows
    if rows != ANSWERS:
        write_preferences(folder / PREFERENCES, rows, SAMPLES)
    if settings.recipe.training.teacher:
        _write_teacher(folder)
    recipe = tiny_recipe(settings, strategy, folder / "model", world)
    print(*without_gpu(recipe), sep="", end="")
    (folder / REHEARSAL).write_text(yaml.safe_dump(recipe, sort_keys=False))


def _write_teacher(folder: Path) -> None:
    """Write a teacher with the tiny model's config and the built-in data's tokens. Its weights are the same on all hosts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "model", trust_remote_code=False)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(folder / TEACHER)
    PreTrainedTokenizerFast.from_pretrained(TOKENIZER, trust_remote_code=False).save_pretrained(folder / TEACHER)


def with_small_axes(strategy: Strategy) -> Strategy:
    """Return the strategy with each of its axes over two ranks."""
    if not strategy.axes:
        return strategy
    two: dict[str, Any] = dict.fromkeys(strategy.axes.used, 2)
    small = replace(strategy.axes, **two)
    return replace(strategy, axes=small, ds_config=strategy.ds_config and with_axes(strategy.ds_config, small))


def model_config(settings: Settings) -> tuple[Config, str]:
    """(the config of the model that the recipe or a flag names, with what its class adds; where it is from): the model's own
    directory, the config.json beside the recipe, or the Hub.

    Raise UserError where the one beside the recipe is another model's, as far as this machine knows the model.
    """
    from transformers import CONFIG_MAPPING

    name, beside = location(settings), config_beside(settings)
    if (Path(name) / "config.json").is_file():
        path = Path(name) / "config.json"
    elif beside:
        path = beside
        if remote_code.cached(name, path.name, settings.recipe.model.revision):
            check_beside(settings, load_config(settings))
    else:
        return load_config(settings).to_dict(), name
    config = read_config(path)
    # What a config leaves to its class has to be known before layers are left out: which of them are of which kind.
    kind = config.get("model_type")
    if kind in CONFIG_MAPPING:
        config = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(config)).to_dict()
    return config, str(path)


def tiny_recipe(settings: Settings, strategy: Strategy, model: Path, world: World) -> Fields:
    """The recipe with the tiny model, the built-in data and a few steps; method, optimizer, precision, clipping, schedule,
    checkpointing, packing and strategy stay the recipe's."""
    recipe, schedule = without_unread(settings), settings.recipe.training.lr_scheduler_kwargs
    recipe["model"] |= {
        "model_name_or_path": str(model),
        "from_scratch": True,
        "tokenizer_name_or_path": BUILT_IN,
        "revision": None,
        "trust_remote_code": False,
        "adapter_name_or_path": None,  # its weights are no tiny model's
        "trainable_token_indices": _tokens(settings.recipe.model),
    }
    compares = objective_of(settings.recipe.training).compares
    if compares and settings.recipe.training.reference not in (None, MODEL, ADAPTERS_OFF):
        recipe["training"]["reference"] = MODEL  # another one is not tiny
    recipe["data"] = {
        **({"train_file": str(model.with_name(PREFERENCES))} if compares else {"dataset_name": BUILT_IN}),
        "chat_template": "chatml",
        "max_length": 64,
        "packing": settings.recipe.data.packing,
        "max_train_samples": SAMPLES,
        "max_eval_samples": 9,
    }
    recipe["training"] |= {
        "global_batch_size": 4 * strategy.axes.data(world.size),
        "reference_batch_size": None,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "teacher": settings.recipe.training.teacher and str(model.with_name(TEACHER)),
        "max_steps": STEPS,
        "save_steps": SAVE_STEPS,
        "eval_steps": SAVE_STEPS if settings.recipe.training.load_best_model_at_end else None,
        "early_stopping_patience": None,  # all steps are compared
        "eval_answers": min(settings.recipe.training.eval_answers, strategy.axes.data(world.size)),  # each rank one
        "answer_score": None,  # of answers that the rehearsal's data has none of
        "metric_for_best_model": "eval_loss",
        "eval_tasks": [],
        "eval_tasks_chat_template": False,
        "logging_steps": 1,
        "warmup_steps": 0,
        "lr_scheduler_kwargs": {key: value for key, value in schedule.items() if key not in PHASES},
        "report_to": [],
        "report_page": False,
        "save_total_limit": None,
        **_rounds(settings, strategy),
    }
    recipe["cluster"] |= strategy.as_cluster() | {"hostfile": None, "gpu": None}
    return recipe


def _tokens(section: ModelSection) -> list[int | str]:
    """Return the same number of trained tokens for the built-in tokenizer. Its token 0 is padding; it gets the same new ones."""
    new = {*section.add_tokens, *section.add_special_tokens}
    kept = [token for token in section.trainable_token_indices if token in new]
    return [*range(1, 1 + len(section.trainable_token_indices) - len(kept)), *kept]


def _rounds(settings: Settings, strategy: Strategy) -> Fields:
    """Return the keys of replicas: rounds that end at a rehearsal's checkpoints and, on its one host, a replica for each rank or
    for each HSDP group."""
    training = settings.recipe.training
    if training.sync_every is None:
        return {}
    every = SAVE_STEPS if training.sync_every >= SAVE_STEPS else 1
    unit = "rank" if strategy.replicate == 1 else "auto"
    return {"sync_every": every, "sync_fragments": min(training.sync_fragments, 2, every), "sync_replica": unit}


def without_gpu(recipe: Fields) -> list[str]:
    """Replace, in place, what a CPU cannot compute with the nearest thing that it can. Return one line for each replacement."""
    import torch

    replaced: list[str] = []
    if torch.cuda.is_available():
        return replaced
    if recipe["model"]["attn_implementation"] not in ("auto", "varlen", "sdpa", "eager"):
        replaced.append(f"sdpa stands in for {recipe['model']['attn_implementation']}, which needs a GPU\n")
        recipe["model"]["attn_implementation"] = "sdpa"
    if recipe["training"]["fp16"]:
        replaced.append("bf16 stands in for fp16, which is slow on a CPU\n")
        recipe["training"] |= {"fp16": False, "bf16": True}
    return replaced


def _launch(count: int, settings: Settings) -> int:
    """Start this same command under torchrun on `count` ranks of this host; returns its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    program, *words = started_as(settings.argv)
    command += [str(REPOSITORY / STORY), *words] if program == STORY else [str(RUNNER), program, *words]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    import torch

    if torch.cuda.device_count() < count:  # a rehearsal of two ranks fits on the CPU of any machine
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(command, env=environment).returncode


def _interrupt(run: Path) -> None:
    """Leave the directory as a run that was killed after its first checkpoint would."""
    (run / SUCCESS).unlink()
    for leftover in (f"checkpoint-{STEPS}", "trainer_state.json", "model.safetensors", "adapter_model.safetensors"):
        path = run / leftover
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for of_replica in run.glob(f"replica-*/checkpoint-{STEPS}"):
        shutil.rmtree(of_replica)


def _losses(trainer: TrainingContext) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _judge(
    strategy: Strategy,
    first: list[float],
    second: list[float],
    held: list[States],
    optim: str = "adamw_torch_fused",
    adapters: bool = False,
) -> None:
    """Raise RuntimeError if the resumed run's losses (second) are not the uninterrupted run's, or if any rank holds
    more than the strategy's formula allows: then something that should be sharded is not."""
    import torch

    # On a CPU to the last bit; on a GPU attention's backward pass adds up in an order of its own.
    tolerance = 1e-2 if torch.cuda.is_available() else 0.0
    same = len(first) == len(second) and all(map(partial(math.isclose, rel_tol=tolerance), first, second))
    if not same or len(first) != STEPS or not all(map(math.isfinite, first)):
        raise RuntimeError(f"the resumed run's losses differ from the uninterrupted run's:\n{first}\n{second}")
    for rank, states in enumerate(held):
        for part, most in _allowed(strategy, states, rank, len(held), optim, adapters).items():
            if getattr(states, part) > most:
                problem = f"rank {rank} holds {getattr(states, part)} bytes of {part}, at most {most:.0f} are allowed"
                raise RuntimeError(f"{strategy.name} does not shard as it should: {problem}")


def _allowed(strategy: Strategy, states: States, rank: int, count: int, optim: str, adapters: bool) -> dict[str, float]:
    """The most bytes of each part that a rank may hold: 1.1 of what the formula says of a sharded model, and from
    every parameter one row or 1,024 elements whole (FSDP2 pads to rows, ZeRO-3 keeps small parameters whole)."""

    def formula(size: Callable[[tuple[int, ...]], int], ranks: int, **more: Any) -> Any:
        trained, frozen = sum(map(size, states.shapes)), sum(size(shape) * width for shape, width in states.frozen)
        stays = optim.removeprefix("paged_")  # on a CPU what is paged is memory like any other
        return model_states(strategy.kind, trained, ranks, states.half, stays, frozen=frozen, adapters=adapters, **more)

    # What a stage or a rank of a tensor group holds is sharded only over the data-parallel ranks.
    divided = strategy.axes.stages * strategy.axes.tensor
    shard = count // divided // strategy.replicate
    place = strategy.axes.place(rank, count)
    rank = place.data * strategy.axes.sequence + place.sequence
    hpz = (strategy.ds_config or {}).get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    cut = cut_parameters([math.prod(shape) for shape in states.shapes], shard)[rank % shard]
    sharded, whole = formula(math.prod, shard, cut=cut, hpz=int(hpz != 1)), formula(_row, 1)
    return {part: 1.1 * getattr(sharded, part) + getattr(whole, part) for part in PARTS}


def _row(shape: tuple[int, ...]) -> int:
    size = math.prod(shape)
    return min(size, max(1024, size // (*shape, 1)[0]))


def _report(strategy: Strategy, held: list[States]) -> None:
    from rich.table import Table

    table = Table("KiB on rank", "parameters", "gradients", "optimizer states", title=f"states under {strategy.name}")
    for rank, states in enumerate(held):
        table.add_row(str(rank), *(f"{getattr(states, part) / 1024:,.0f}" for part in PARTS))
    console(columns=OF_LOGS).print(table)
    print("The rehearsal went well: trained, saved, resumed with the same losses.", flush=True)
