"""Which checkpoint a run continues from: one that is whole, and of this run, this strategy, these ranks and this base."""

import json
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..errors.console import counted
from ..recipe.files import read_yaml
from ..run import directory as runs
from ..strategy.deepspeed_config import value_at

RECORD = "brigade.json"  # the last file of a checkpoint: {"run": run.yaml, "base": digests, "files": {name: bytes}}
_STATE = "trainer_state.json"
REHEARSAL = "rehearsal.yaml"  # the recipe of a rehearsal
_FLAG = "flag --resume_from_checkpoint"
# What a checkpoint of each engine holds; by the first it is known. For those that earlier versions wrote, without a record.
_PARTS = {
    "DeepSpeed": ("global_step*", "latest", "global_step*/*_model_states.pt", "global_step*/*_optim_states.pt"),
    "FSDP2": ("pytorch_model_fsdp*", "optimizer*"),
    "one process or DDP": ("*model*.safetensors", "optimizer.pt"),
}
_PARTS_OF_ALL = (_STATE, "scheduler.pt")


def record(folder: Path, run: runs.Run) -> None:
    """Write down what belongs to a checkpoint and whose it is. Call it when all ranks have written their parts."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    files.pop(RECORD, None)
    document = {"run": read_yaml(run.directory / runs.RECORD), "base": run.base, "files": files}
    temporary = folder / f".{RECORD}"
    temporary.write_text(json.dumps(document, indent=1, default=str))
    temporary.replace(folder / RECORD)


def reopen(folder: Path) -> None:
    """Before a checkpoint is written over one that a dead run left: what says that it is whole must go first."""
    for name in (RECORD, _STATE):
        (folder / name).unlink(missing_ok=True)


def choose(run: runs.Run, fingerprint: str, base: dict[str, str]) -> Path | None:
    """The checkpoint to continue from: the one asked for, else the newest whole one in the run's directory; None: there is
    none yet. run.skipped says which were left out, and why.

    fingerprint: of the data; base: consistency.digests of the weights that the run begins with.
    Raises UserError where it is no checkpoint, damaged, or of another run, strategy, number of ranks or base.
    """
    named, fresh = run.settings.resume_from_checkpoint, run.settings.fresh
    if not named:
        folder = None if fresh else _newest(run)
        if folder:
            _check(folder, str(folder), run, base)
        return folder
    folder = Path(named)
    if not _finished(folder):
        raise UserError(
            _FLAG,
            f"{named!r} is not a checkpoint: no {_STATE} in it",
            "name a checkpoint-N directory, or leave the flag out to take the newest",
        )
    if fresh and run.directory.resolve() in folder.resolve().parents:
        raise UserError(
            "flags --fresh, --resume_from_checkpoint",
            f"--fresh would move {named!r} away first",
            "drop one of the two, or give another --output_dir",
        )
    if problem := flaw(folder):
        cure = "name another checkpoint, or leave the flag out to take the newest whole one"
        raise UserError(_FLAG, f"{named!r} cannot be continued from: {problem}", cure)
    _check_run(folder, run, fingerprint)
    _check(folder, _FLAG, run, base)
    return folder


def way_on(run: runs.Run, state: Any) -> str:
    """Where a run stands that is stopped now, and how it goes on. state: of its Trainer."""
    step, steps = state.global_step, state.max_steps
    if run.settings.recipe_path.name == REHEARSAL:
        return f"at step {step} of {steps} of a rehearsal. The same command begins it anew."
    newest = next((folder for folder in runs.checkpoints(run.directory) if flaw(folder) is None), None)
    flags = {"--fresh": run.settings.fresh, "--resume_from_checkpoint": run.settings.resume_from_checkpoint}
    without = f" without {' and '.join(flag for flag, given in flags.items() if given)}" if any(flags.values()) else ""
    if newest is None:
        return f"at step {step} of {steps}. There is no checkpoint yet: the same command begins at step 0."
    lost = step - int(newest.name.rpartition("-")[2])
    again = f", {counted(lost, 'step')} before this one" if lost else ""
    return f"at step {step} of {steps}. The same command{without} continues from {newest}{again}."


def flaw(folder: Path) -> str | None:
    """Why nothing can continue from a checkpoint, in words: what is missing, cut short or unreadable. Without checksums: a
    changed byte inside a file is not seen."""
    from safetensors import SafetensorError, safe_open

    if not _finished(folder):
        return "it was not written to its end"
    try:
        kept = _kept(folder)
        for name, size in kept.get("files", {}).items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (there := (folder / name).stat().st_size) != size:
                return f"{name} has {there:,} bytes of {size:,}"
        for pattern in (*_PARTS_OF_ALL, *_PARTS[_engine(folder)]):
            if not kept and not any(folder.glob(pattern)):
                return f"{pattern} is missing"
        json.loads((folder / _STATE).read_bytes())
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="numpy"):
                pass
    except (OSError, ValueError, SafetensorError) as error:
        return f"it cannot be read: {error}"
    return None


def _finished(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (RECORD, _STATE))


def _newest(run: runs.Run) -> Path | None:
    """The newest whole one. None also where the only one is the first, and the run died while it was written."""
    found = {path: flaw(path) for path in runs.checkpoints(run.directory)}
    for folder, problem in found.items():
        if problem is None:
            return folder
        run.skipped.append(f"{folder.name}: {problem}")
    damaged = next((folder for folder in found if _finished(folder)), None)
    if damaged:
        more = f", and so are {len(found) - 1} older" if len(found) > 1 else ""
        raise UserError(
            str(damaged),
            f"the newest checkpoint is damaged ({found[damaged]}){more}: there is none to continue from",
            "bring its files back from a copy; without one, move the damaged checkpoints away, and the run begins at step 0",
        )
    return None


def _check_run(folder: Path, run: runs.Run, fingerprint: str) -> None:
    """Raises UserError where a named checkpoint was written by a run that computes something else."""
    beside = folder.resolve().parent / runs.RECORD
    old = _kept(folder).get("run") or (read_yaml(beside) if beside.is_file() else None)
    if old is None:
        return
    other, _ = runs.another_run(old, run)
    if not other and (old.get("run") or {}).get("data", fingerprint) != fingerprint:
        other = "its data or tokenizer is not this one's"
    if other:
        cure = "give this run the same recipe and strategy"
        cure += f" (--recipe {beside})" if beside.is_file() else ""
        raise UserError(_FLAG, f"{str(folder)!r} belongs to another run: {other}", f"{cure}, or leave the flag out")


def _check(folder: Path, place: str, run: runs.Run, base: dict[str, str]) -> None:
    kept, strategy = _kept(folder), run.strategy
    engine = _engine(folder)
    ours = "DeepSpeed" if strategy.is_deepspeed else "FSDP2" if strategy.is_fsdp else "one process or DDP"
    if engine != ours:
        problem = f"{folder.name} was written by {engine}, and this run's strategy is {strategy.name}"
        raise UserError(place, problem, "continue under the strategy that wrote it")
    if engine == "DeepSpeed" and not _fits_other_ranks(strategy.ds_config):
        rank_files = len(list(folder.glob("global_step*/*zero_pp_rank_*_optim_states.pt")))
        ranks = (kept.get("run") or {}).get("run", {}).get("ranks", rank_files)
        if ranks != run.world.size:
            problem = (
                f"{folder.name} holds ZeRO's states of {counted(ranks, 'rank')}, and this run has {run.world.size}"
            )
            raise UserError(place, problem, f"continue on {counted(ranks, 'rank')}: ZeRO cannot divide its states anew")
    if run.settings.recipe.model.use_peft and base != kept.get("base", base):
        changed = sorted(name for name in base | kept["base"] if base.get(name) != kept["base"].get(name))
        problem = f"the adapters in {folder.name} were trained on another base: {', '.join(changed[:3])} changed since"
        raise UserError(place, problem, "bring the base model's files back, at the same revision")


def _fits_other_ranks(ds_config: dict[str, Any] | None) -> bool:
    return any(
        value_at(ds_config, key) for key in ("zero_optimization.elastic_checkpoint", "checkpoint.load_universal")
    )


def _engine(folder: Path) -> str:
    return next((name for name, (sign, *_) in _PARTS.items() if any(folder.glob(sign))), "one process or DDP")


def _kept(folder: Path) -> dict[str, Any]:
    path = folder / RECORD
    return json.loads(path.read_text()) if path.is_file() else {}
