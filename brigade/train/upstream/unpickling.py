"""Files that torch and DeepSpeed have pickled, read as data: nothing is built of a class that is not listed here.

A pickle names functions to call, so whoever has written one can run code where it is loaded. torch.load refuses that with
weights_only=True, but DeepSpeed and torch ask for weights_only=False where they read checkpoints by themselves
(deepspeed: TorchCheckpointEngine.load, _raise_if_autoep_zero3_partitioned_checkpoint of utils/zero_to_fp32.py, and
load_hp_checkpoint_state_from_checkpoint_dir_stage3; torch: DefaultLoadPlanner.load_bytes). An environment variable overrules them
(torch/serialization.py: load). The .metadata of a distributed checkpoint goes through pickle.load itself
(torch/distributed/checkpoint/filesystem.py: read_metadata), and here through a table. So it does not matter whether a file
changes between a check and a load.
"""

import importlib
import os
import pickle
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ...errors import UserError, first_line

# What DeepSpeed's own files hold besides tensors and plain values.
DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
# What the files with random numbers hold; Transformers allows it while it loads them (trainer_pt_utils.py: safe_globals).
_NUMPY = {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")} | {"numpy.ndarray", "numpy.dtype"}
# What .metadata may hold, by module; besides these torch's types of numbers (torch.float32).
METADATA = {
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
# Files of a checkpoint that some engine unpickles. training_args.bin is none: nobody loads it.
_PICKLED = ("*.pt", "*.pth", "*.metadata", "pytorch_model*.bin", "adapter_model.bin", "optimizer*.bin")
_CURE = (
    "do not use it: bring it back from a copy that you trust, or ask whoever made it for its weights as *.safetensors"
)


class Damaged(UserError):
    """A file of which not even the names in it can be read."""


def data_only() -> None:
    """Let torch.load and torch's distributed checkpoints unpickle nothing but data in this process from here on."""
    from torch.distributed.checkpoint import filesystem

    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    filesystem.pickle = _PickleOfMetadata  # type: ignore[assignment]


def allow(names: Iterable[str]) -> None:
    """Let torch.load build these classes of DEEPSPEED."""
    import torch

    for module, _, name in (full.rpartition(".") for full in DEEPSPEED & {*names}):
        torch.serialization.add_safe_globals([getattr(importlib.import_module(module), name)])


def pickled(folder: Path) -> list[Path]:
    """The files in a checkpoint that some engine unpickles, in an order that is the same everywhere."""
    return sorted({path for pattern in _PICKLED for path in folder.rglob(pattern) if path.is_file()})


def check(files: Iterable[Path]) -> None:
    """Look for classes that are in no table here. It reads names from the pickles and loads no tensor.

    Raises UserError for the first file that holds one, with its name, and Damaged for one that is damaged.
    """
    from torch.serialization import get_unsafe_globals_in_checkpoint

    for file in files:
        with _told(file):
            if file.name.endswith(".metadata"):
                with file.open("rb") as stream:
                    _PickleOfMetadata.load(stream)
                continue
            found = {*get_unsafe_globals_in_checkpoint(file)}
        strange = sorted(found - DEEPSPEED - _NUMPY)
        if strange:
            raise _refusal(file, strange[0])
        allow(found)


def load(file: Path, **options: object) -> Any:
    """Return what is in a file of torch.save. options: torch.load's. Raises UserError as check() does."""
    import torch

    check([file])
    return torch.load(file, weights_only=True, **options)


def refusal(file: object, error: pickle.UnpicklingError) -> UserError:
    """Return what torch.load says of a file, as a mistake that names the class."""
    found = re.search(r"GLOBAL (\S+) was not", str(error))
    if found:
        return _refusal(file, found[1])
    return UserError(str(file), "it holds more than weights, or is damaged: torch.load refuses it", _CURE)


def _refusal(file: object, name: str) -> UserError:
    problem = f"it holds {name}, which no checkpoint needs: to load it could run code of whoever wrote the file"
    return UserError(str(file), problem, _CURE)


@contextmanager
def _told(file: object) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = f"it is damaged, or torch has not written it: {type(error).__name__}: {first_line(error)}"
        raise Damaged(str(file), problem, _CURE) from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._file = getattr(stream, "name", ".metadata")

    def find_class(self, module: str, name: str) -> Any:
        import torch

        found = getattr(sys.modules.get(module), name, None)
        if name in METADATA.get(module, ()) or (module == "torch" and isinstance(found, torch.dtype)):
            return found
        raise _refusal(self._file, f"{module}.{name}")


class _PickleOfMetadata:
    """What torch's distributed checkpoints call the module pickle."""

    dump = staticmethod(pickle.dump)

    @staticmethod
    def load(stream: IO[bytes]) -> Any:
        """The Metadata in a .metadata. Raises UserError where it holds anything else, or names files of other directories."""
        from torch.distributed.checkpoint.metadata import Metadata

        file = str(getattr(stream, "name", ".metadata"))
        with _told(file):
            found = _Unpickler(stream).load()
            outside = [kept.relative_path for kept in found.storage_data.values() if not is_inside(kept.relative_path)]
        if not isinstance(found, Metadata):
            raise _refusal(file, type(found).__name__)
        if outside:
            raise UserError(file, f"it names a file of another directory: {outside[0]!r}", _CURE)
        return found


def is_inside(name: object) -> bool:
    """Whether it is the name of a file in the directory of the file that names it, or below that."""
    if not isinstance(name, str):
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
