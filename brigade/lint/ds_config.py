"""What only lint says of a ds_config: values that fit one recipe alone, defaults written out, and what others mean.

What a run refuses too is in strategy/deepspeed.py, what keys and values mean in strategy/ds_keys.yaml.
"""

import json
from collections.abc import Iterator
from typing import Any

from ..strategy.deepspeed import key_table, value_at
from .rules import Finding, shown

_DROP = "remove the line: the run is the same"


def findings(config: dict[str, Any], name: str) -> Iterator[Finding]:
    known = key_table()
    for path, owner in known["owned_by_recipe"].items():
        value = value_at(config, path, "auto")
        if value != "auto" and not path.startswith(("optimizer", "scheduler")):  # those are errors as a whole
            problem = f"{shown(value, _form)} is fixed here, and the recipe owns it"
            yield Finding("ds-owned-by-recipe", name, path, problem, f'write "auto"; the recipe\'s key is {owner}')
    if "gradient_clipping" not in config:
        problem = f"it is absent: DeepSpeed {known['deepspeed']} then clips at 1.0, except under train.py"
        yield Finding("ds-clipping-absent", name, "gradient_clipping", problem, 'add "gradient_clipping": "auto"')
    gather = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    if value_at(config, "zero_optimization.stage") == 3 and not value_at(config, gather):
        found = value_at(config, gather)
        problem = f"{'it is absent' if found is None else shown(found, _form)}: a run ends without model.safetensors"
        yield Finding("ds-weights-not-gathered", name, gather, problem, "set it to true")
    for path in known["meanings"]:
        yield from _meaning(config, name, path)
    yield from _defaults(config, name)


def _form(value: Any) -> str:
    """As JSON has it; 1e9 stays short."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str)


def _meaning(config: dict[str, Any], name: str, path: str) -> Iterator[Finding]:
    """What this value does against the default, and whether it matters."""
    value, entry = value_at(config, path), key_table()["meanings"][path]
    if value is None or value == "auto":
        return
    stage = value_at(config, "zero_optimization.stage")
    offload = value_at(config, "zero_optimization.offload_optimizer.device", "none") != "none"
    for case in entry["cases"]:
        if stage not in case.get("stages", [stage]) or offload is not case.get("offload", offload):
            continue
        if all(_holds(value, relation, case[relation]) for relation in ("is", "above", "below") if relation in case):
            yield Finding(entry["rule"], name, path, f"{shown(value, _form)}: {case['means']}", case["cure"])
            return


def _holds(value: Any, relation: str, other: Any) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return relation == "is" and value is other
    if not isinstance(value, (int, float)):
        return False
    return {"is": value == other, "above": value > other, "below": value < other}[relation]


def _defaults(config: dict[str, Any], name: str, prefix: str = "") -> Iterator[Finding]:
    known = key_table()
    for key, value in config.items():
        path = f"{prefix}{key}"
        entry = known["allowed"].get(path, {})
        if entry.get("block") and isinstance(value, dict):
            yield from _defaults(value, name, f"{path}.")
        elif path in known["owned_by_recipe"] or path in known["meanings"] or value is None or "default" not in entry:
            continue
        elif value == entry["default"] and isinstance(value, bool) is isinstance(entry["default"], bool):
            yield Finding("ds-default-written-out", name, path, f"{shown(value, _form)} is DeepSpeed's default", _DROP)
