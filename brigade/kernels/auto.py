"""What `auto` takes on GPUs: the fastest kernels that are proven on every device of a run. It chooses attention and, where the
recipe says `auto`, Liger's kernels and compiled layers, as they are proven together, and the form of the optimizer.

All ranks of a run compute in the same way, so no rank takes what one host lacks.
"""

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from ..errors import first_line
from ..errors.tables import Fields
from ..train.distributed import ranks
from ..train.distributed.devices import index as gpu_index
from ..train.host.cluster import World
from ..train.model import attention
from ..train.recipe.objectives import may_share
from ..train.recipe.settings import Settings
from ..train.recipe.training_section import TrainingSection
from ..train.run.offers import Proofs
from ..train.strategy import Strategy
from . import judging, models, paths, proofs, prove
from .paths import ATTENTION, LAYERS, LIGER, ONCE, OPTIMIZER, PROMPTS, PROVEN, SET, Row

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What a set of kernels means for a recipe's keys.
PARTS = {"use_liger_kernel": "liger", "torch_compile": "compiled"}
KINDS = {"use_liger_kernel": (LIGER, SET), "torch_compile": (LAYERS, SET), "optim": (OPTIMIZER,)}


def prove_for_run(
    settings: Settings, strategy: Strategy, world: World, config: "PreTrainedConfig", compiler: bool
) -> Proofs:
    """Decide what a run's recipe leaves to proofs. A collective. compiler: whether this host has a compiler for kernels"""
    ours = closed(settings.recipe.training, strategy, compiler)
    everywhere = set().union(*ranks.gather(sorted(ours)))
    return settle(settings, config, world, everywhere, divides_sequences=strategy.axes.sequence > 1)


def settle(
    settings: Settings,
    config: "PreTrainedConfig",
    world: World,
    closed: Collection[str] = (),
    divides_sequences: bool = False,
) -> Proofs:
    """Decide which attention is proven and what the keys of settings.by_proof become: the same on all ranks, and nothing where a
    host has no GPU.

    closed: keys that keep their defaults, because the strategy computes in another way than a proof does
    divides_sequences: whether the strategy divides sequences over ranks

    The first rank of each host and kind of GPU looks for its proof, and makes the short one where there is none. Every rank
    has to call this. It raises nothing: a run goes on without a proof as it would have before.
    """
    proven_here: dict[str, Row] | None = None
    device = _device(world)
    devices = ranks.gather((world.host, device))
    everywhere = all(name for _, name in devices)
    if everywhere and devices.index((world.host, device)) == world.rank:
        try:
            proven_here = here(settings, config, world, str(device), asked(settings, closed))
        except Exception as error:  # a run that trains does not end for a proof's sake
            _say(world, f"kernels are not proven: {type(error).__name__}: {first_line(error)}")
    answers = ranks.gather(proven_here)
    verdicts = [answers[rank] for rank, each in enumerate(devices) if devices.index(each) == rank]
    if not everywhere:
        return Proofs()
    proven = common([verdict.get(ATTENTION) if verdict else None for verdict in verdicts])
    named = settings.recipe.model.attn_implementation
    how = attention.choose(settings, config, divides_sequences, proven)[0] if named == "auto" else named
    sets = common([verdict.get(SET) if verdict and verdict.get("with") == how else None for verdict in verdicts])
    optimizers = common([verdict.get(OPTIMIZER) if verdict else None for verdict in verdicts])
    return Proofs(proven, taken(settings, closed, sets, optimizers), unshared(verdicts, how))


def closed(training: TrainingSection, strategy: Strategy, compiler: bool) -> set[str]:
    """Keys that no proof decides in this run: it divides layers, or another key of the recipe or the lack of a compiler excludes
    them. Liger's kernels compute the same in every strategy (train/engines/kernels.py: apply_liger).

    ZeRO-3 gathers weights before each module of a layer: torch makes a program of each module, and not one of the layer, as a
    proof times it (docs/evidence/compiled.md).
    """
    again = training.activation_checkpointing
    refused = again == "selective" or (again and strategy.kind in ("fsdp2", "hsdp"))  # strategy/refused.yaml
    in_pieces = strategy.axes or strategy.kind == "zero3"
    return {"torch_compile"} if in_pieces or training.tiled_mlp or refused or not compiler else set()


def asked(settings: Settings, closed: Collection[str] = ()) -> list[str]:
    """The kinds of paths that a recipe leaves to proofs."""
    kinds = [ATTENTION] * (settings.recipe.model.attn_implementation == "auto")
    kinds += [PROMPTS] * may_share(settings.recipe.training)
    kinds += [kind for key in settings.by_proof if key not in closed for kind in KINDS[key]]
    return list(dict.fromkeys(kinds))


def words_for(settings: Settings, kinds: Collection[str] = ()) -> Row:
    """The arguments of prove.on_this_host() that come from a recipe. kinds: as from asked(); default: those, or only attention"""
    return {
        "kinds": kinds or asked(settings) or [ATTENTION],
        "attention": settings.recipe.model.attn_implementation,
    }


def taken(settings: Settings, closed: Collection[str], sets: dict[str, float], optimizers: dict[str, float]) -> Fields:
    """The values of the keys that proofs decide. sets, optimizers: as from common()"""
    free = [key for key in PARTS if key in settings.by_proof and key not in closed]
    values: Fields = {"optim": next(iter(optimizers))} if optimizers else {}
    for name in sets:
        means = {key: part in paths.table()[name]["uses"] for key, part in PARTS.items()}
        if all(key in free or means[key] == getattr(settings.recipe.training, key) for key in PARTS):
            values |= {key: means[key] for key in free}
            break
    return {key: value for key, value in values.items() if key in settings.by_proof and key not in closed}


def unshared(verdicts: list[dict[str, Row] | None], how: str) -> str:
    """Why no pair shares its prompt with the attention `how`; "" where it is proven on all devices."""
    for verdict in verdicts:
        row = verdict.get(PROMPTS, {}) if verdict else {}
        if row.get("attention") != how:
            return Proofs().no_sharing
        if row["status"] != PROVEN:
            return str(row["why"])
    return ""


def common(verdicts: list[dict[str, float] | None]) -> dict[str, float]:
    """{path: milliseconds on the slowest device} of what all devices have proven, fastest first; {} where one has no proof."""
    known = [verdict for verdict in verdicts if verdict is not None]
    if not known or len(known) < len(verdicts):
        return {}
    slowest = {
        name: max(verdict[name] for verdict in known) for name in known[0] if all(name in verdict for verdict in known)
    }
    return dict(sorted(slowest.items(), key=lambda entry: entry[1]))


def here(
    settings: Settings, config: "PreTrainedConfig", world: World, device: str, kinds: Collection[str]
) -> dict[str, Row] | None:
    """{kind: {path: milliseconds}, fastest first} of what this rank's device has proven, by the proof in the cache or by a new
    short one; and "with": the attention that sets were tried with. None where nothing is asked for or proven."""
    written, shapes = models.as_json(config), prove.shapes_of(settings)
    proof, note = proofs.read(proofs.key(written, shapes, proofs.device(gpu_index(world) or 0)))
    for name in asked_for(settings):  # the user's choice counts, but a proof that it is wrong is told
        row = (proof or {"paths": {}})["paths"].get(name, {})
        if row.get("status") == "wrong":
            _say(world, f"warning: {name} does not compute what eager in fp32 does on {device}: {row['why']}")
    if not kinds:
        return None
    if note:
        _say(world, note)
    how = words_for(settings, kinds)
    if proof is None:
        once = f"at most {prove.QUICK['seconds']:.0f} s, once for this driver and these versions"
        _say(world, f"proving kernels on {device} ({once})")
        proof = prove.on_this_host(written, shapes, quick=True, index=gpu_index(world) or 0, **how)
        for line in in_words(proof):
            _say(world, line)
        if ATTENTION in kinds and not prove.proven_times(proof):
            reason = models.unprovable(written) or _held(proof) or "see `python -m brigade kernels`"
            _say(world, f"no attention is proven here ({reason}): `auto` goes by what is installed")
            return None
        if proofs.write(proof) is None:
            _say(world, f"the proof cannot be kept in {proofs.folder()}: each run makes it again")
    elif late := judging.to_try(proof, **how):
        _say(world, f"trying {', '.join(late)} on {device} (at most {prove.QUICK['seconds']:.0f} s)")
        proof = _again(written, shapes, world, proof, how)
    if LAYERS in kinds and "with_compiled" not in proof["paths"]:
        command = "`python -m brigade kernels RECIPE` takes the minutes that it needs"
        _say(world, f"compiled layers are not proven here: {command}")
    proven: Fields = {
        kind: in_order(prove.proven_times(proof, kind), proof, kind) for kind in (ATTENTION, SET, OPTIMIZER)
    }
    tried = {row.get("attention") for name, row in proof["paths"].items() if name in proven[SET]}
    return proven | {"with": tried.pop() if len(tried) == 1 else None, PROMPTS: proof["paths"].get(ONCE, {})}


def _again(written: Row, shapes: Row, world: World, proof: Row, how: Row) -> Row:
    """Return the proof completed with what it lacked, or the old one where that cannot be tried."""
    try:
        new = prove.on_this_host(written, shapes, quick=True, index=gpu_index(world) or 0, known=proof, **how)
    except Exception as error:  # a run that trains does not end for a proof's sake
        _say(world, f"it cannot be tried: {type(error).__name__}: {first_line(error)}")
        return proof
    for line in in_words(new):
        _say(world, line)
    proofs.write(new)
    return judging.merged(proof, new)


def _held(proof: Row) -> str:
    """Say where no other process gets the GPU that this one holds: its compute mode is EXCLUSIVE_PROCESS; else ""."""
    if not any("busy or unavailable" in row.get("why", "") for row in proof["paths"].values()):
        return ""
    why = "this run holds the GPU, whose compute mode, EXCLUSIVE_PROCESS, lets no other process in"
    return f"{why}; `python -m brigade kernels RECIPE` before a run makes the proof and keeps it"


def asked_for(settings: Settings) -> list[str]:
    """The paths that a recipe names itself."""
    model, training = settings.recipe.model, settings.recipe.training
    dtype = "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32"
    kernels = ["liger"] * training.use_liger_kernel + ["compiled"] * training.torch_compile
    return [model.attn_implementation, training.optim, dtype, *kernels]


def in_order(times: dict[str, float], proof: Row, kind: str = ATTENTION) -> dict[str, float]:
    """Times with the fastest first. Those too close to tell apart become equal, and stay in the table's order (judging.judge)."""
    best = times.get(proof["fastest"].get(kind, ""))
    tied = {name for name in times if best is not None and proof["paths"][name]["status"] == "proven"}
    equal = {name: best if name in tied and best is not None else value for name, value in times.items()}
    return dict(sorted(equal.items(), key=lambda entry: entry[1]))


def in_words(proof: Row) -> list[str]:
    """One line for each path that this host has."""
    lines = []
    for name, row in proof["paths"].items():
        if row["status"] == "absent":
            continue
        words = [f"  {name}: {row['status']}"]
        words += [f"{row['ms']:.1f} ms"] if row.get("ms") is not None else []
        words += [row["why"]] if row.get("why") else []
        lines.append(", ".join(words))
    return [*lines, f"  in {proof['seconds']} s"]


def _device(world: World) -> str | None:
    index = gpu_index(world)
    return None if index is None else torch.cuda.get_device_name(index)


def _say(world: World, line: str) -> None:
    print(f"{world.host}: {line}" if world.hosts > 1 else line, file=sys.stderr, flush=True)
