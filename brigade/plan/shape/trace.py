"""The second engine for memory: what the model's own code keeps, traced once without weights and remembered. Bytes.

The planner's formulas count operation by operation what autograd should keep. A trace runs the model's real code instead,
forward and backward, on tensors that have a shape and no data (traced_model.py), and so knows any architecture that
Transformers knows. It sees what one process allocates: model states, gathered layers, buckets and CUDA's context stay
formulas. This module remembers traces; it imports torch only where one is missing.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...train import cache
from .trace_settings import Trace, TraceSettings

# What a trace, or a shape that is read off a model's code, depends on.
NAMES = (
    "trace",
    "trace_settings",
    "traced_model",
    "stand_ins",
    "from_code",
    "from_config",
    "layer_sizes",
    "lora",
    "model_shape",
    "tower",
)
CODE = [Path(__file__).with_name(f"{name}.py") for name in NAMES]
HALL = Path(__file__).parents[2] / "train"
CODE += [HALL / "model" / f"{name}.py" for name in ("config_json", "per_layer", "sizes")]
CODE += [HALL / "upstream" / "experts.py"]


def trace(config: Mapping[str, Any], settings: TraceSettings, rows: int = 1) -> Trace:
    """Trace a model with this config.json: from the cache in milliseconds, else in seconds with torch.

    Raises UserError for a model that Transformers cannot build or whose code cannot be traced.
    """

    def measure() -> dict[str, Any]:
        from .traced_model import measure

        try:
            return asdict(measure(config, settings))
        except UserError as error:  # remembered as well
            return {"refused": [error.place, error.problem, error.cure]}

    values = remembered(config, asdict(settings) | {"kernels": sorted(settings.kernels)}, measure)
    if "refused" in values:
        raise UserError(*values["refused"])
    return Trace(**values | {"layers": tuple(values["layers"])}).times(rows)


def remembered(config: Mapping[str, Any], what: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> Any:
    """Return make(), or what it returned for the same config, `what`, and versions of torch, transformers and this code."""
    code = [hashlib.sha256(path.read_bytes()).hexdigest() for path in CODE]
    key = json.dumps([config, versions(), version("peft"), code, what], sort_keys=True, default=str)
    return json.loads(cache.remembered(key, lambda: json.dumps(make()), lambda text: text.endswith("}")))


def versions() -> dict[str, str]:
    """The versions of the packages that a trace depends on."""
    return {package: version(package) for package in ("torch", "transformers")}
