"""Remember what was read off a model that Transformers has built, so that only the first call imports torch."""

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from ...errors.tables import Document, Fields
from ...train.host import cache

# What a shape that is read off a model's code depends on.
NAMES = ("remembered", "built", "from_code", "from_config", "layer_sizes", "lora", "mixers", "model_shape", "tower")
CODE = [Path(__file__).with_name(f"{name}.py") for name in NAMES]
HALL = Path(__file__).parents[2] / "train"
CODE += [HALL / "model" / f"{name}.py" for name in ("config_json", "per_layer", "sizes")]
CODE += [HALL / "upstream" / "experts.py"]


def remembered(config: Document, what: Document, make: Callable[[], Fields]) -> Fields:
    """Return make(), or what it returned for the same config, `what`, and versions of torch, transformers and this code."""
    code = [hashlib.sha256(path.read_bytes()).hexdigest() for path in CODE]
    key = json.dumps([config, versions(), version("peft"), code, what], sort_keys=True, default=str)
    return json.loads(cache.remembered(key, lambda: json.dumps(make()), lambda text: text.endswith("}")))


def versions() -> dict[str, str]:
    """The versions of the packages that a model's code depends on."""
    return {package: version(package) for package in ("torch", "transformers")}
