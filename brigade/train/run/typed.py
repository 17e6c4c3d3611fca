"""What the files of a run may say: each field's type. A field of another type is left out, for the files may be a stranger's, and
looking at a run must not fail because of them. Fields that are in no table are kept, where they are not nested without end.
"""

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

MOST = 2**53  # what a count may be: floats hold it exactly
LONGEST = 100_000  # characters of a text
DEEPEST = 6  # tables within tables

_PICTURE = re.compile("data:image/png;base64,[A-Za-z0-9+/]+=*")

Fields = dict[str, Callable[[object], bool]]


def is_number(value: object) -> TypeGuard[float]:
    """NaN and infinity are numbers, too: a loss may be one."""
    return not isinstance(value, bool) and (isinstance(value, float) or (isinstance(value, int) and abs(value) <= MOST))


def is_count(value: object) -> bool:
    """Whether a value is a whole number from 0."""
    return not isinstance(value, bool) and isinstance(value, int) and 0 <= value <= MOST


def is_amount(value: object) -> TypeGuard[float]:
    """Seconds, bytes, degrees."""
    return is_number(value) and math.isfinite(value) and 0 <= value <= MOST


def is_text(value: object) -> TypeGuard[str]:
    """Whether a value is a text that is not too long."""
    return isinstance(value, str) and len(value) <= LONGEST


def are_texts(value: object) -> bool:
    """Whether a value is a list of texts."""
    return isinstance(value, list) and all(map(is_text, value))


def is_table(value: object) -> TypeGuard[dict[str, object]]:
    """Whether a value is a table with texts as keys."""
    return isinstance(value, dict) and all(isinstance(key, str) for key in value) and is_shallow(value)


def is_shallow(value: object, depth: int = DEEPEST) -> bool:
    """Whether a value ends, and within a few levels: a YAML alias may lead to itself."""
    inside: Iterable[object] = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    )
    return depth > 0 and all(is_shallow(part, depth - 1) for part in inside)


def or_none(check: Callable[[object], bool]) -> Callable[[object], bool]:
    """A test that None passes too."""
    return lambda value: value is None or check(value)


_NUMBERS = ("loss", "held_out_loss", "tokens_per_second", "tokens_per_second_per_gpu", "tokens", "mfu", "step_time", "data_time",
            "peak_memory_gib", "slowest_rank_score", "learning_rate", "grad_norm", "score", "bytes")  # fmt: skip
PHASE: Fields = {  # of a start (distributed/timeline.py)
    "name": is_text, "began": is_amount, "seconds": is_amount,
}  # fmt: skip
EVENT: Fields = {
    **dict.fromkeys(("time", "event", "text", "what", "why", "by", "host", "source"), is_text),
    **dict.fromkeys(("step", "steps", "rank", "ranks"), is_count),
    **dict.fromkeys(_NUMBERS, or_none(is_number)),
    **dict.fromkeys(("seconds", "blocked"), or_none(is_amount)),
    "hosts": are_texts,
    "phases": lambda value: isinstance(value, list) and all(kept(each, PHASE).keys() >= PHASE.keys() for each in value),
    **dict.fromkeys(("parts", "kernels"), lambda value: is_table(value) and all(map(is_amount, value.values()))),
}
RUN: Fields = {  # run.yaml's `run`
    **dict.fromkeys(("ranks", "replicas"), is_count),
    **dict.fromkeys(("hosts", "overridden"), or_none(are_texts)),
    "strategy": lambda value: is_table(value) and is_text(value.get("name", "")),
    "versions": is_table,
    "lengthened": lambda value: isinstance(value, list) and is_shallow(value),
}
MARKER: Fields = {
    **dict.fromkeys(("by", "time"), is_text),
    "steps": is_count,
    **dict.fromkeys(("held_out_loss", "held_out_loss_before"), or_none(is_number)),
}
HEARTBEAT: Fields = {
    **dict.fromkeys(("rank", "pid", "step", "writings", "memory"), is_count),
    **dict.fromkeys(("host", "phase", "state"), is_text),
    **dict.fromkeys(("seconds", "age", "cpu"), is_amount),
    **dict.fromkeys(("tokens", "at"), or_none(is_amount)),
    "waits": or_none(lambda value: is_table(value) and kept(value, WAITS) == value),
}
WAITS: Fields = {"collective": is_text, "group": is_text, "number": lambda value: isinstance(value, int)}
HOST: Fields = dict.fromkeys(
    ("cores", "busy", "total", "memory", "memory_total", "received", "sent", "temperature", "joules"), is_amount
)
GPU: Fields = {
    **dict.fromkeys(("index", "used", "memory", "memory_total", "temperature", "watts"), is_amount),
    "pids": lambda value: isinstance(value, list),
}
ANSWER: Fields = {  # its texts are as long as the run's sequences
    "step": is_count,
    **dict.fromkeys(("source", "question", "reference", "answer"), lambda value: isinstance(value, str)),
    "images": lambda value: (
        isinstance(value, list) and all(is_text(text) and _PICTURE.fullmatch(text) for text in value)
    ),
}

TASK: Fields = {
    **dict.fromkeys(("task", "metric", "filter", "lm_eval", "time"), is_text),
    "step": is_count,
    "value": is_number,
    "stderr": or_none(is_number),
    **dict.fromkeys(("samples", "shots", "limit"), or_none(is_count)),
    "chat_template": lambda value: isinstance(value, bool),
}


def kept(entry: object, fields: Fields) -> dict[str, Any]:
    """The fields of an entry that have their type; {} for what is not a table."""
    if not isinstance(entry, dict):
        return {}
    known = ((key, value) for key, value in entry.items() if isinstance(key, str))
    return {key: value for key, value in known if fields.get(key, is_shallow)(value)}


def loaded(text: str | bytes) -> Any:
    """A JSON document. Raise ValueError, also where it is nested without end."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested without end") from None
