"""Turn a Job into plain values for run.yaml, and back. No torch."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import TypeAdapter

from ...errors import UserError, shortened
from ...errors.tables import Document, Fields
from ..costs.job import Job
from ..shape.from_code import MeasuredShape
from ..shape.model_shape import ModelShape

# Fields that records of runs have had: always with train.py's value, or of what no formula asks any more.
OLDER = {"ours", "sequence_parallel", "bounded", "fp32_weights"}


def record(job: Job) -> Fields:
    """Return a Job as plain values, for YAML: those that differ from the defaults."""
    return dict(_plain(job))


def _plain(value: object) -> Any:
    if is_dataclass(value):
        values = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
        return {name: _plain(own) for name, (own, default) in values.items() if own != default}
    if isinstance(value, frozenset):
        return sorted(value)
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def job_of_record(values: Document, place: str) -> Job:
    """Return the Job that record() wrote. Raises UserError at `place` for anything else."""
    try:
        known = _known(values)
        known["shape"] = _shape(known["shape"])
        compared = known.get("comparison")
        if compared:
            known["comparison"] = compared | {"shape": _shape(compared.get("shape"))}
        return TypeAdapter(Job).validate_python(known, extra="forbid")
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        problem = f"it is no configuration that this version of Brigade writes ({shortened(str(error), 160)})"
        raise UserError(place, problem, "run the recipe once more") from None


def _known(value: object) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _known(inner) for key, inner in value.items() if key not in OLDER}


def _shape(values: Document | None) -> ModelShape | None:
    if values is None:
        return None
    measured = not values.keys() <= {field.name for field in fields(ModelShape)}  # counted in the model's code
    return TypeAdapter(MeasuredShape if measured else ModelShape).validate_python(values, extra="forbid")
