"""What only lint says of a ds_config: values that fit only one recipe, lines without effect, and what others mean.

train/strategy/deepspeed_config.py has what a run refuses too, and train/strategy/ds_keys.yaml what keys and values mean.
"""

from collections.abc import Iterator

from ..errors import shown
from ..errors.findings import Finding
from ..errors.tables import Document
from ..train.strategy.deepspeed_config import holds, offloads_states, owned_values
from ..train.strategy.ds_keys import as_json, key_table, leaves, value_at


def findings(config: Document, name: str) -> Iterator[Finding]:
    """Warnings and notes on a ds_config whose keys have DeepSpeed's own names (deepspeed_config.judge() returns it so)."""
    for path, owner in owned_values().items():
        value = value_at(config, path, "auto")
        if value != "auto":
            yield Finding.of("ds-owned-by-recipe", name, path, value=shown(value, _as_written), owner=owner)
    if "gradient_clipping" not in config:
        yield Finding.of("ds-clipping-absent", name, "gradient_clipping", deepspeed=key_table()["deepspeed"])
    path = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    gathers = value_at(config, path)
    if value_at(config, "zero_optimization.stage") == 3 and not gathers:
        value = "it is absent" if gathers is None else shown(gathers, _as_written)
        yield Finding.of("ds-weights-not-gathered", name, path, value=value)
    yield from _lines(config, name)


def _as_written(value: object) -> str:
    """A value as JSON writes it, but 1e9 stays short."""
    return f"{value:g}" if isinstance(value, float) else as_json(value)


def _lines(config: Document, name: str) -> Iterator[Finding]:
    """One finding for all lines that this stage does not read, one for all that change nothing, and what the others mean."""
    known, stage = key_table(), value_at(config, "zero_optimization.stage")
    unread, idle, explained = list[str](), list[str](), dict[str, list[tuple[str, str]]]()
    for path, value in leaves(config):
        entry, block = known["allowed"][path], known["allowed"].get(path.rpartition(".")[0], {})
        key = path.removeprefix("zero_optimization.")
        default = entry.get("here", entry.get("default", "none"))
        if "by_stage" in entry:
            default = entry["by_stage"].get(stage)
        if stage in (1, 2, 3) and stage not in entry.get("stages", block.get("stages", (1, 2, 3))):
            unread.append(key)
        elif path in known["owned_by_recipe"]:
            continue
        elif entry.get("no_effect") or (not isinstance(default, dict) and holds(value, default)):
            idle.append(key)
        elif meaning := known["meanings"].get(path):
            meant = f"{key} {shown(value, _as_written)}: {_means(config, value, meaning['cases'])}"
            explained.setdefault(meaning["rule"], []).append((path, meant))
    if unread:
        yield Finding.of("ds-other-stage", name, "zero_optimization", stage=stage, keys=", ".join(unread))
    if idle:
        yield Finding.of("ds-default-written-out", name, "", keys=", ".join(idle))
    for rule, meanings in explained.items():
        at = meanings[0][0] if len(meanings) == 1 else meanings[0][0].partition(".")[0]
        yield Finding.of(rule, name, at, means="; ".join(meant for _, meant in meanings))


def _means(config: Document, value: object, cases: list[Document]) -> str:
    """What this value does, compared with the default: the first case that fits."""
    offload = offloads_states(config)
    for case in cases:
        if holds(value, case.get("is", {"not": None})) and case.get("offload", offload) is offload:
            return str(case["means"])
    return ""
