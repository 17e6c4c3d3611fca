"""The weights in an output directory or a checkpoint-N, whichever strategy wrote them. Needs no GPU and no process group."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UserError, first_line
from ..run import on_disk
from ..run.directory import RECORD, check_exists
from ..run.success import SUCCESS, unfinished
from ..upstream import unpickling
from .manifest import odd_file, tag_of

if TYPE_CHECKING:
    import torch

FULL, ADAPTER = "model*.safetensors", "adapter_model.safetensors"
OTHER_STEP = "name another step: --step N"


def find(output: Path, step: int | None) -> Path:
    """Where to read weights from: checkpoint-`step`, else a finished run's own directory, else the newest whole checkpoint.

    Raises UserError where there is no such step (and lists the steps there are), where a finished run's model is gone (another
    step is another model), where nothing is whole, and where something is not a file.
    """
    folder = _find(output, step)
    strange = odd_file(folder)
    if strange:
        raise UserError(str(strange), "it is a pipe, a socket or a device, and no file", "remove it")
    return folder


def _find(output: Path, step: int | None) -> Path:
    check_run(output)
    whole = on_disk.whole_checkpoints(output)
    steps = f"checkpoints there are: {', '.join(map(str, sorted(whole))) or 'none'}"
    if step is not None:
        if step not in whole:
            there = output / f"checkpoint-{step}"
            problem = (
                f"checkpoint-{step} is incomplete: its run died while it was saved"
                if there.is_dir()
                else f"no step {step}"
            )
            if (there / on_disk.STATE).is_file() and on_disk.step_of(there) != step:
                problem = f"checkpoint-{step} holds step {on_disk.step_of(there)}, by its manifest,"
            raise UserError("flag --step", f"{problem} in {output}", steps)
        return whole[step]
    problem = unfinished(output)
    if SUCCESS not in problem:  # it has reached its end
        lacks = f"not whole: {problem}" if _reader(output) else "gone: no *.safetensors"
        if problem or not _reader(output):
            cure = f"copy it again where it was copied, or take another step: --step N ({steps})"
            raise UserError(str(output), f"the run is finished, and its model is {lacks}", cure)
        return output
    if not whole:
        cure = "wait for its first (save_steps), or start the run's command again"
        raise UserError(str(output), "the run is not finished, and it has no whole checkpoint yet", cure)
    return whole[max(whole)]


def check_run(output: Path) -> None:
    """Raise UserError where `output` is not the output directory of a run."""
    check_exists(output)
    if not (output / RECORD).is_file():
        problem = f"there is no {RECORD} in it, so it is no run's output directory"
        raise UserError(str(output), problem, "name the directory that train.py printed as its output")


def load(folder: Path, dtype: "torch.dtype | None" = None) -> dict[str, "torch.Tensor"]:
    """{name: whole tensor} on the CPU: all weights, or the trained ones of a run with adapters.

    dtype: the torch.dtype that floating-point tensors get, one after another; None: they keep theirs

    Raises UserError where a file is missing or damaged.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    reader = _reader(folder)
    if reader is None:
        problem = "no weights in it: no *.safetensors, no DeepSpeed checkpoint (latest, global_step*), "
        raise UserError(str(folder), f"{problem}no FSDP checkpoint (pytorch_model_fsdp_0)", OTHER_STEP)
    try:
        state = reader(folder)
        for name, tensor in state.items():
            whole = tensor.contiguous()  # under ZeRO a tensor is put together from all ranks' slices only now
            state[name] = whole.to(dtype) if dtype and whole.is_floating_point() else whole
        return state
    except UserError:
        raise
    except (Exception, CheckpointException) as error:  # torch's is not an Exception
        problem = f"it cannot be read: {type(error).__name__}: {first_line(error)}"
        raise UserError(str(folder), problem, OTHER_STEP) from None


def in_hugging_face_format(folder: Path) -> bool:
    """Whether a directory holds whole weights as Transformers reads them."""
    return any(folder.glob(FULL))


def _reader(folder: Path) -> Callable[[Path], dict[str, "torch.Tensor"]] | None:
    if in_hugging_face_format(folder) or (folder / ADAPTER).is_file():
        return _safetensors
    if (folder / "latest").is_file():
        return _deepspeed
    return _fsdp if (folder / "pytorch_model_fsdp_0").is_dir() else None


def _safetensors(folder: Path) -> dict[str, "torch.Tensor"]:
    from safetensors.torch import load_file

    files = sorted(folder.glob(FULL)) or [folder / ADAPTER]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _deepspeed(folder: Path) -> dict[str, "torch.Tensor"]:
    """The weights under ZeRO-1, 2 and 3: fp32 master copies, put together from each rank's slices."""
    unpickling.data_only()
    unpickling.check(unpickling.pickled(tag_of(folder)))
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(folder), lazy_mode=True)


def _fsdp(folder: Path) -> dict[str, "torch.Tensor"]:
    """The weights under FSDP2 and HSDP: shards of DTensors in torch's distributed checkpoint."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    unpickling.data_only()
    unpickling.check(unpickling.pickled(folder / "pytorch_model_fsdp_0"))
    state: dict[str, dict[str, torch.Tensor]] = {}
    reader = FileSystemReader(folder / "pytorch_model_fsdp_0")
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state["model"]
