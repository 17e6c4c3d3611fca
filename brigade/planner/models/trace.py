"""The second engine for memory: what the model's own code keeps, traced once without weights and remembered. Bytes.

The formulas count operation by operation what autograd should keep (layer.py). A trace runs the model's real code instead,
forward and backward, on tensors that have a shape and no data (traced_model.py), and so knows any architecture that
Transformers knows. It sees what one process allocates: model states, gathered layers, buckets and CUDA's context stay
formulas. This module reads and writes the memory of traces; it imports torch only where a trace is missing.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.cache import cache_directory
from ...errors import UserError
from .layer import Attention, Kernels

if TYPE_CHECKING:
    from ..choice.job import Job

CODE = [Path(__file__).with_name(f"{name}.py") for name in ("trace", "traced_model", "stand_ins", "shape_from_code")]


@dataclass(frozen=True)
class TraceSettings:
    """What is traced of a model: one row of `length` tokens; rows of a micro-batch are as many times as much.

    autocast: bf16 products over fp32 weights and an fp32 residual stream, as DDP computes; else all in bf16, as ZeRO and FSDP2
    checkpointing: every layer is computed again in the backward pass
    attention: "eager", or a flash kernel, of which all keep the same
    kernels: as of a Job; their Triton code is not traced, but what their autograd functions save is
    """

    length: int
    autocast: bool = False
    checkpointing: bool = False
    attention: Attention = "flash2"
    kernels: Kernels = frozenset()


@dataclass(frozen=True)
class Trace:
    """Bytes of a micro-batch.

    kept: by all layers from forward to backward pass, with what they share (embeddings, rotary tables, a mask)
    layers: the same by kind of layer, of one layer, in the order in which the kinds appear
    back: what the backward pass of a layer needs besides; with checkpointing, what computing it again keeps too
    loss: what final norm, logits and loss add at their peak
    """

    kept: float
    layers: tuple[float, ...]
    back: float
    loss: float

    def times(self, rows: int) -> "Trace":
        """A micro-batch of so many rows."""
        each = tuple(one * rows for one in self.layers)
        return Trace(self.kept * rows, each, self.back * rows, self.loss * rows)


def settings_of(job: "Job") -> TraceSettings | None:
    """The trace that stands for a job's memory; None where the job splits or recomputes layers as no trace does."""
    split = job.tensor * job.pipeline * job.context * job.expert > 1
    if split or job.checkpointing not in ("none", "full") or job.every > 1 or job.offload_activations or job.dropout:
        return None
    attention: Attention = "eager" if job.attention == "eager" else "flash2"
    return TraceSettings(job.sequence, job.autocast, job.checkpointing == "full", attention, job.kernels)


def trace(config: Mapping[str, Any], settings: TraceSettings, rows: int = 1) -> Trace:
    """Of a model with this config.json. From the cache in milliseconds, else in seconds with torch.

    Raises UserError for a model that Transformers cannot build or whose code cannot be traced.
    """

    def measure() -> dict[str, Any]:
        from .traced_model import measure

        try:
            return asdict(measure(config, settings))
        except UserError as error:  # remembered as well
            return {"refused": [error.place, error.problem, error.cure]}

    found = remembered(config, asdict(settings) | {"kernels": sorted(settings.kernels)}, measure)
    if "refused" in found:
        raise UserError(*found["refused"])
    return Trace(**found | {"layers": tuple(found["layers"])}).times(rows)


def remembered(config: Mapping[str, Any], what: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> Any:
    """make(), or what it returned before for the same config, versions of torch, transformers and this code, and `what`."""
    code = [hashlib.sha256(path.read_bytes()).hexdigest() for path in CODE]
    text = json.dumps([config, versions(), code, what], sort_keys=True, default=str)
    path = cache_directory() / "traces" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        found = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as aside:
            json.dump(found, aside)
        Path(aside.name).replace(path)
    except OSError:  # a cache that cannot be written costs time, not the answer
        pass
    return found


def versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found
