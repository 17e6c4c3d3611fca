"""Which checkpoint a run continues from: one that is whole, of this run and this base, with states that the run can take over."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...errors import UserError
from ...errors.console import counted
from ...errors.tables import Fields
from ..distributed import ranks
from ..recipe.files import read_yaml
from ..run import directory as runs
from ..run import on_disk, same_run
from ..upstream import unpickling
from . import compatibility, saved_weights
from .manifest import RECORD, damage, finished, flaw, oddity, recorded, shares, sizes

if TYPE_CHECKING:
    from transformers import TrainerState

Choice = tuple[Path | None, tuple[str, ...]]  # a checkpoint or None; in words, the ones that are left out, and why
_FLAG = "flag --resume_from_checkpoint"


def agree(run: runs.Run, fingerprint: str, base: Mapping[str, str]) -> Choice:
    """Choose a checkpoint in which every byte is what was written: all ranks together read it. A collective.

    Where hosts have output directories of their own, it is the newest that is whole on all of them.
    Ends all ranks with one message where choose() raises UserError on any, and where a file could run code when it is loaded.
    """
    damaged: dict[str, str] = {}
    while True:
        with ranks.agreed(run.world):
            folder, skipped = choose(run, fingerprint, base, damaged)
        folders = ranks.gather((on_disk.step_of(folder), folder.name) if folder else None)
        if not any(folders):
            return None, skipped
        problems = ranks.gather(problem_together(run, folder, folders))
        if not any(problems):
            problem = None
            with ranks.agreed(run.world):
                try:
                    check_pickles(run, folder)
                except unpickling.Damaged as error:  # one without a checksum
                    assert folder
                    problem = folder.name, f"{Path(error.place).name}: {error.problem}"
            problems = ranks.gather(problem)
        if not any(problems):
            return folder, skipped
        damaged |= dict(filter(None, problems))


def choose(
    run: runs.Run, fingerprint: str, base: Mapping[str, str], damaged: Mapping[str, str] = MappingProxyType({})
) -> Choice:
    """The checkpoint to continue from: the one asked for, else the newest whole one in the run's directory, or None.

    fingerprint: of the data; base: consistency.digests of the weights that the run begins with
    damaged: checkpoint-N -> what is wrong with it, where its files' sizes do not tell
    Raises UserError where it is not a checkpoint, is damaged, or belongs to another run, strategy, number of ranks or base.
    """
    named, fresh = run.settings.resume_from_checkpoint, run.settings.fresh
    if not named:
        newest, skipped = (None, ()) if fresh else _newest(run, damaged)
        if newest:
            _check(newest, str(newest), run, base)
        return newest, skipped
    folder = Path(named)
    folder = folder.resolve() if folder.name in ("", "..") else folder
    number = run.replica.replica
    if number:
        own = folder.parent / f"replica-{number}" / folder.name
        folder = own if flaw(own) is None else folder
    if not finished(folder):
        cure = "name a checkpoint-N directory, or leave the flag out to take the newest"
        raise UserError(_FLAG, f"{named!r} is not a checkpoint: no {on_disk.STATE} in it", cure)
    if fresh and run.directory.resolve() in folder.resolve().parents:
        cure = "drop one of the two, or give another --output_dir"
        raise UserError("flags --fresh, --resume_from_checkpoint", f"--fresh would move {named!r} away first", cure)
    problem = damaged.get(folder.name) or flaw(folder)
    if problem:
        cure = "name another checkpoint, or leave the flag out to take the newest whole one"
        raise UserError(_FLAG, f"{named!r} cannot be continued from: {problem}", cure)
    _check_run(folder, run, fingerprint)
    _check(folder, _FLAG, run, base)
    if not _record_of(folder):
        problem = f"{named!r} is another tool's: there is neither {RECORD} in it nor {runs.RECORD} beside it, and nobody knows "
        problem += "which data, order of samples and optimizer its states belong to"
        cure = f"to start from its weights: {_start_from(folder, run)}, without --resume_from_checkpoint; "
        cure += f"if an earlier version of Brigade wrote it, bring its run's {runs.RECORD} back beside it"
        raise UserError(_FLAG, problem, cure)
    return folder, ()


def problem_together(
    run: runs.Run, folder: Path | None, folders: list[tuple[int, str] | None]
) -> tuple[str, str] | None:
    """(checkpoint-N, what is wrong with it) as far as this rank sees; None: nothing. folders: (step, name) of what each rank has
    chosen

    Engines that write in parts need one directory that all hosts share, and each rank reads its share of the files. Under DDP
    each host may have its own directory: there the ranks of a host share its files.
    """
    if folder is None or None in folders:
        return None  # directory.claim() says on which host there is none
    _, oldest = min(filter(None, folders))
    if folder.name != oldest:
        return folder.name, f"not all hosts have it whole; {oldest} is the newest that they all have"
    size, rank = _readers(run)
    names = shares(sizes(recorded(folder)), size)[rank]
    problem = damage(folder, names)
    return (folder.name, problem) if problem else None


def check_pickles(run: runs.Run, folder: Path | None) -> None:
    """Check this rank's share of the files that an engine unpickles. Raises UserError as unpickling.check() does."""
    size, rank = _readers(run)
    unpickling.check(unpickling.pickled(folder)[rank::size] if folder else ())


def _readers(run: runs.Run) -> tuple[int, int]:
    """(number of the ranks that read a checkpoint together, which of them this one is)."""
    here = run.replica
    return (here.size, here.rank) if run.strategy.writes_in_parts else (here.local_size, here.local_rank)


def how_to_continue(run: runs.Run, state: "TrainerState") -> str:
    """Where a run that stops now stands, and how it can go on, in words. state: of its Trainer"""
    here = f"at step {state.global_step} of {state.max_steps}"
    if run.settings.recipe_path.name == runs.REHEARSAL:
        return f"{here} of a rehearsal. The same command begins it anew."
    folders = on_disk.checkpoints(run.directory)
    newest = next((folder for folder in folders if flaw(folder) is None), None)
    if newest is None:
        return f"{here}. There is no checkpoint yet: the same command begins at step 0."
    flags = {"--fresh": run.settings.fresh, "--resume_from_checkpoint": run.settings.resume_from_checkpoint}
    given = [flag for flag, value in flags.items() if value]
    without = f" without {' and '.join(given)}" if given else ""
    lost = state.global_step - on_disk.step_of(newest)
    if lost < 0:  # this run began at an older one, by --resume_from_checkpoint
        older = (folder for folder in folders if on_disk.step_of(folder) <= state.global_step)
        own = next((folder for folder in older if flaw(folder) is None), None)
        here += f". --resume_from_checkpoint {own} continues from here" if own else ""
    again = f", {counted(abs(lost), 'step')} {'before' if lost > 0 else 'after'} this one" if lost else ""
    return f"{here}. The same command{without} continues from {newest}{again}."


def _newest(run: runs.Run, damaged: Mapping[str, str]) -> Choice:
    """The newest whole checkpoint; None where there is no checkpoint at all. Raises UserError where all are damaged."""
    every = {path.name: path for path in on_disk.checkpoints(run.directory)}
    if run.own_directory != run.directory:  # where a replica has no part of a checkpoint, it takes the first one's
        every |= {path.name: path for path in on_disk.checkpoints(run.own_directory) if flaw(path) is None}
    newest_first = sorted(every.values(), key=on_disk.step_of, reverse=True)
    problems = {path: damaged.get(path.name) or flaw(path) for path in newest_first}
    whole = next((path for path, problem in problems.items() if problem is None), None)
    newer = [path for path in problems if whole is None or on_disk.step_of(path) > on_disk.step_of(whole)]
    if newer and whole is None:
        more = f", and so are {len(newer) - 1} older" if len(newer) > 1 else ""
        problem = f"the newest checkpoint is damaged ({problems[newer[0]]}){more}: there is none to continue from"
        cure = "bring its files back from a copy; without one, --fresh moves this run aside and begins anew"
        raise UserError(str(newer[0]), problem, cure)
    known = {path.name: problems[path] for path in newer}
    renamed = {
        path.name: oddity(path)
        for path in newest_first
        if on_disk.step_of(path) != on_disk.named_step(path.name) and path != whole
    }
    return whole, tuple(f"{name}: {problem}" for name, problem in (renamed | known).items())


def _check_run(folder: Path, run: runs.Run, fingerprint: str) -> None:
    """Raise UserError where a named checkpoint was written by a run that computes something else."""
    beside = folder.resolve().parent / runs.RECORD
    old = _record_of(folder)
    if not old:
        return
    other, _ = same_run.another_run(old, run.settings, run.strategy, with_strategy=False)
    if not other and (old.get("run") or {}).get("data", fingerprint) != fingerprint:
        other = "its data or tokenizer is not this one's"
    if other:
        recipe = f" (--recipe {beside})" if beside.is_file() else ""
        cure = f"give this run the same recipe{recipe}; or to start from its weights: {_start_from(folder, run)}, "
        cure += "without --resume_from_checkpoint"
        raise UserError(_FLAG, f"{str(folder)!r} belongs to another run: {other}", cure)


def _record_of(folder: Path) -> Fields:
    """The run.yaml of the run that wrote a checkpoint; {} where it is not known."""
    beside = folder.resolve().parent / runs.RECORD
    return recorded(folder).get("run") or (read_yaml(beside) if beside.is_file() else {})


def _start_from(folder: Path, run: runs.Run) -> str:
    """How a new run starts from a checkpoint's weights, in words."""
    if saved_weights.in_hugging_face_format(folder):
        own = " --from_scratch false" if run.settings.recipe.model.from_scratch else ""
        return f"--model_name_or_path {folder}{own}"
    if (folder.resolve().parent / runs.RECORD).is_file():
        merge = " --merge" if (folder / saved_weights.ADAPTER).is_file() else ""
        export = f"python -m brigade export {folder.parent} MODEL --step {on_disk.step_of(folder)}{merge}"
        return f"{export}, and then --model_name_or_path MODEL"
    return "make a whole model of it with the tool that wrote it, and name that: --model_name_or_path MODEL"


def _check_method(folder: Path, place: str, run: runs.Run) -> None:
    """Raise UserError where a checkpoint's files show another method than the run's: whole weights, or adapters."""
    whole, adapted = saved_weights.in_hugging_face_format(folder), (folder / saved_weights.ADAPTER).is_file()
    use_peft = run.settings.recipe.model.use_peft
    if (use_peft and whole and not adapted) or (adapted and not use_peft):
        has, trains = ("adapters", "all weights") if adapted else ("whole weights", "adapters (use_peft)")
        problem = f"{folder.name} holds {has}, and this run trains {trains}: it was written by another method"
        problem += "" if _record_of(folder) else f", and by another tool, for {RECORD} is not in it"
        cure = f"to start from its weights: {_start_from(folder, run)}, without --resume_from_checkpoint"
        raise UserError(place, problem, cure)


def _check(folder: Path, place: str, run: runs.Run, base: Mapping[str, str]) -> None:
    """Raise UserError at `place` where this run can neither read nor reshard the checkpoint's states, and where its
    adapters were trained on another base."""
    _check_method(folder, place, run)
    refused = compatibility.refusal(folder, run)
    if refused:
        raise UserError(place, *refused)
    before = recorded(folder).get("base", base)
    if run.settings.recipe.model.use_peft and base != before:
        changed = sorted(name for name in {**base, **before} if base.get(name) != before.get(name))
        problem = f"the adapters in {folder.name} were trained on another base: {', '.join(changed[:3])} changed since"
        raise UserError(place, problem, "bring the base model's files back, at the same revision")
