"""Report an out-of-memory error of a GPU in a user's terms: where it happened, what was in the memory, and what would fit."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...errors import UserError, Whose, first_line
from ..distributed import heartbeat, read_once
from ..distributed.process import this_process
from ..host import control_groups
from ..run.directory import Run
from ..run.offers import Remedies
from ..upstream import memory_snapshots
from .throughput import device_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


# Of torch's allocator, of CUDA's and NCCL's own allocations, and of cuBLAS where it finds no room for its workspace.
_IN_WORDS = re.compile(r"(CUDA|HIP|Cuda|NCCL)\b.*out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.DOTALL)
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_OF_TORCH = re.compile(r"[\\/](site|dist)-packages[\\/]torch[\\/]")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Functions of the Trainer between two steps -> what they do. An error that leaves them has ended their phase of the heartbeat.
AT_REST = {"evaluate": "evaluation", "save_checkpoint": "checkpoint", "save_model": "checkpoint"}
# GiB beside torch's allocator: more than CUDA's context and the buffers of many NCCL communicators take.
OF_OTHERS = 6.0
ROOM = 3 * 2**30  # bytes: more than what asks without saying for how much (a context, cuBLAS, NCCL) wants at once
OTHERS = "free this GPU: `nvidia-smi` on its host names the processes"
CAREFUL = "-low-memory"  # ends the name of a recipe beside another one that takes less memory, and more time
CURE = "a smaller per_device_train_batch_size, activation_checkpointing or a strategy that shards more: docs/troubleshooting.md"
NONE = "no smaller micro-batch, no kernels and no file of ds_configs/ or accelerate_configs/ fits by its count: take more GPUs"
NONE += "{adapters} or a shorter max_length"


def explain(run: Run, config: PreTrainedConfig, resumed: bool, error: BaseException) -> UserError | None:
    """Return an out-of-memory error as one that names what would make the run fit; None for any other error.

    config: the model's; resumed: whether the run continues from a checkpoint

    In the first step of a new run it comes again whatever happens: it is the user's. A run that has trained before may lack
    memory for fragments, or for one long sample, and `launch --restarts` may try again; so it may where other processes have
    the memory.
    """
    cause = _cause(error)
    if cause is None:
        return None
    memory = Memory.read(cause)
    if memory.has_room:
        return None
    step = int(this_process.heartbeat.page[heartbeat.STEP])
    frames = traceback.extract_tb(cause.__traceback__)
    phase = next((AT_REST[frame.name] for frame in frames if frame.name in AT_REST), "")
    phase = phase or heartbeat.PHASES[int(this_process.heartbeat.page[heartbeat.PHASE])]
    where = f"{phase} at step {step}" if step else phase
    frame = next((frame for frame in reversed(frames) if not _OF_TORCH.search(frame.filename)), None)
    at = [f"{Path(frame.filename).name}:{frame.lineno}"] if frame else []
    at += _kept(run, error)
    whose: Whose = "user" if step <= 1 and not resumed else "run"
    problem = str(memory)
    if memory.of_others_gib > OF_OTHERS:
        cure, whose = OTHERS, "host"
    elif phase in AT_REST.values():
        cure = _cure_at_rest(run, phase)
    else:
        remedies = _remedies(run, config, memory)
        cure, problem = _cure(remedies, run), f"{problem}; {remedies.counted}"
    place = f"memory of {device_name()}, in {where}" + f" ({', '.join(at)})" * bool(at)
    return UserError(place, problem, cure, whose, code=2 if whose == "user" else 1)


def _kept(run: Run, error: BaseException) -> list[str]:
    """Write the whole traceback and what the GPU's memory holds beside the rank's other records (watch/watch_thread.py).

    Returns where, in words.
    """
    file = run.home / heartbeat.FOLDER / f"rank-{run.world.number}.traceback"
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)  # but not its parents: no directory that is unmounted meanwhile is made anew
        file.write_text("".join(traceback.format_exception(error)))
        snapshot = file.with_suffix(".memory.pickle")
        drawn = [f"its memory, for pytorch.org/memory_viz: {snapshot}"] if memory_snapshots.write(snapshot) else []
        return [f"traceback: {file}", *drawn]
    return []


def _remedies(run: Run, config: PreTrainedConfig, memory: Memory) -> Remedies:
    try:
        return run.offers.what_fits(run, config, memory.needed)
    except Exception as failure:  # whoever fails to explain an error must not hide it
        what = first_line(failure) if type(failure).__name__ == "NotCovered" else f"{type(failure).__name__}: {failure}"
        return Remedies(f"the planner cannot say what would fit: {' '.join(what.split())[:160]}")


def _cure_at_rest(run: Run, phase: str) -> str:
    """Return what to change where the model is evaluated or saved: no gradients and no training micro-batch are there then."""
    rows = run.settings.recipe.training.per_device_eval_batch_size
    rows = run.batch.micro if rows == "auto" else rows
    if phase == "evaluation" and rows > 1:
        return f"--per_device_eval_batch_size {rows // 2} (it is {rows}), or a strategy that shards more"
    return "a strategy that shards more or offloads: docs/troubleshooting.md"


def _cause(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error that an error is, or that it was raised from (torch/distributed/pipelining/stage.py:
    forward_one_chunk)."""
    cause: BaseException | None = error
    while cause is not None:
        of_words = isinstance(cause, RuntimeError) and _IN_WORDS.search(str(cause))
        if isinstance(cause, torch.OutOfMemoryError) or of_words:
            return cause
        cause = cause.__cause__  # not its __context__: who caught one and went on failed by something else
    return None


@dataclass(frozen=True)
class Memory:
    """Bytes of this rank's GPU, 0 where it has none.

    wanted: by the allocation that failed, 0 where its error does not say
    peak: the most that torch's allocator has had since the last log line; reserved: what it holds, in use or not
    """

    wanted: float
    peak: float = 0.0
    reserved: float = 0.0
    free: float = 0.0
    total: float = 0.0

    @classmethod
    def read(cls, cause: BaseException) -> Memory:
        """Return what an out-of-memory error says, and the GPU as it is now."""
        found = _WANTED.search(str(cause))
        wanted = float(found[1]) * _UNITS[found[2]] if found else 0.0
        try:
            reserved, (free, total) = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
            if torch.cuda.get_device_properties(torch.cuda.current_device()).is_integrated:
                # Its memory is the host's: CUDA counts as taken what others have there, and files that may be dropped.
                free = control_groups.memory_left()["available"]
                total = reserved + free
            return cls(wanted, torch.cuda.max_memory_allocated(), reserved, free, total)
        except Exception:  # no GPU, or one that answers no more
            return cls(wanted)

    @property
    def has_room(self) -> bool:
        """Whether the GPU is not what lacks memory: the host's, page-locked (cudaHostAlloc), lacks in CUDA's same words."""
        return not self.wanted and self.free > ROOM

    @property
    def needed(self) -> float:
        """What the GPU would have had to hold for this allocation."""
        return self.total - self.free + self.wanted if self.total else 0.0

    @property
    def of_others_gib(self) -> float:
        return (self.total - self.free - self.reserved) / 2**30

    def __str__(self) -> str:
        gib = {name: f"{value / 2**30:.1f}" for name, value in vars(self).items()}
        text = "out of memory" + f" while allocating {gib['wanted']} GiB" * (self.wanted >= 2**28)
        if self.total:
            text += f": torch holds {gib['reserved']} of {gib['total']} GiB"
            text += f", allocated {gib['peak']} at most since the last log line"
            if self.of_others_gib > OF_OTHERS:
                text += f", and other processes use {self.of_others_gib:.1f} GiB"
        return text


def _cure(remedies: Remedies, run: Run) -> str:
    """Return what to change: the planner's ways, and what helps where by its count the run fits as it is."""
    adapters = "" if run.settings.recipe.model.use_peft else ", adapters (use_peft)"
    ways = CURE if remedies.ways is None else NONE.format(adapters=adapters)
    if remedies.ways:
        ways = f"by its count the same command fits with {', or with '.join(remedies.ways)}"
    path = run.settings.recipe_path
    careful = path.with_name(f"{path.stem}{CAREFUL}{path.suffix}")
    if careful.is_file():
        ways += f"; {careful} is the recipe for less memory"
    if not remedies.fits:
        return ways
    setting = read_once.allocator_setting()
    if "expandable_segments:True" in setting:
        return f"{ways}; expandable segments are on already, against fragmentation ({setting})"
    if not read_once.has_segments_that_grow():
        return ways
    return f"{ways}; or with {read_once.ALLOCATOR[0]}=expandable_segments:True, against fragmentation"
