"""What only lint says of a ds_config: values that fit one recipe alone, lines without effect, and what others mean.

What a run refuses too is in strategy/deepspeed.py, what keys and values mean in strategy/ds_keys.yaml.
"""

from collections.abc import Iterator
from typing import Any

from ..errors.findings import Finding, shown
from ..strategy.deepspeed_config import holds, value_at
from ..strategy.ds_keys import as_json, key_table


def findings(config: dict[str, Any], name: str) -> Iterator[Finding]:
    """Warnings and notes on a ds_config under DeepSpeed's first names (strategy/deepspeed.py: judge)."""
    known = key_table()
    for path, owner in known["owned_by_recipe"].items():
        value = value_at(config, path, "auto")
        if value != "auto" and not path.startswith(("optimizer", "scheduler")):  # those are errors as a whole
            problem = f"{shown(value, _form)} is fixed here, and the recipe owns it"
            yield Finding("ds-owned-by-recipe", name, path, problem, f'write "auto"; the recipe\'s key is {owner}')
    if "gradient_clipping" not in config:
        problem = f"it is absent: DeepSpeed {known['deepspeed']} then clips at 1.0, except under train.py"
        yield Finding("ds-clipping-absent", name, "gradient_clipping", problem, 'add "gradient_clipping": "auto"')
    stage, gather = value_at(config, "zero_optimization.stage"), "stage3_gather_16bit_weights_on_model_save"
    if stage == 3 and not value_at(config, f"zero_optimization.{gather}"):
        found = value_at(config, f"zero_optimization.{gather}")
        problem = f"{'it is absent' if found is None else shown(found, _form)}: a run ends without model.safetensors"
        yield Finding("ds-weights-not-gathered", name, f"zero_optimization.{gather}", problem, "set it to true")
    yield from _lines(config, name, stage)


def _form(value: Any) -> str:
    """As JSON has it; 1e9 stays short."""
    return f"{value:g}" if isinstance(value, float) else as_json(value)


def _lines(config: dict[str, Any], name: str, stage: Any) -> Iterator[Finding]:
    """One finding for all lines that this stage does not read, one for all that change nothing, and what others mean."""
    known = key_table()
    unread, idle, told = list[str](), list[str](), dict[str, list[tuple[str, str]]]()
    for path, value in _leaves(config):
        entry, key = known["allowed"][path], path.removeprefix("zero_optimization.")
        default = entry["by_stage"].get(stage) if "by_stage" in entry else entry.get("default", "none")
        if stage in (1, 2, 3) and stage not in _stages(path):
            unread.append(key)
        elif path in known["owned_by_recipe"]:
            continue
        elif entry.get("no_effect") or (not isinstance(default, dict) and holds(value, default)):
            idle.append(key)
        elif path in known["meanings"]:
            meaning = known["meanings"][path]
            means = f"{key} {shown(value, _form)}: {_means(config, value, meaning)}"
            told.setdefault(meaning["rule"], []).append((path, means))
    if unread:
        problem = f"under stage {stage} DeepSpeed does not read {', '.join(unread)}"
        cure = "remove them, or set the stage that they are for"
        yield Finding("ds-other-stage", name, "zero_optimization", problem, cure)
    if idle:
        problem = f"these lines change nothing: {', '.join(idle)}"
        yield Finding("ds-default-written-out", name, "", problem, "leave or remove them: the run is the same")
    for rule, meanings in told.items():
        cure = "keep it only if you meant that" if rule == "ds-overlap-comm" else "keep what your GPUs' memory needs"
        at = meanings[0][0] if len(meanings) == 1 else "zero_optimization"
        yield Finding(rule, name, at, "; ".join(means for _, means in meanings), cure)


def _leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        path = f"{prefix}{key}"
        if key_table()["allowed"][path].get("block"):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _stages(path: str) -> list[int]:
    """The stages under which DeepSpeed reads a key: its own, or its block's."""
    allowed = key_table()["allowed"]
    entry = allowed[path] if "stages" in allowed[path] else allowed.get(path.rpartition(".")[0], {})
    stages: list[int] = entry.get("stages", [1, 2, 3])
    return stages


def _means(config: dict[str, Any], value: Any, meaning: dict[str, Any]) -> str:
    """What this value does against the default: the first case that fits."""
    offload = value_at(config, "zero_optimization.offload_optimizer.device", "none") != "none"
    for case in meaning["cases"]:
        wanted = case["is"] if "is" in case else {"above": case["above"]} if "above" in case else {"not": None}
        if holds(value, wanted) and case.get("offload", offload) is offload:
            return str(case["means"])
    return ""
