"""Turn a Job into plain values for run.yaml, and back. No torch."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ...errors import UserError
from ..costs.job import Comparison, Images, Job, Replicas
from ..shape.from_code import MeasuredShape
from ..shape.model_shape import Family, LayerSizes, Mixer, ModelShape, pairs

OLDER = {"ours", "sequence_parallel"}  # fields that records of runs have had, always with train.py's value


def record(job: Job) -> dict[str, Any]:
    """Return a Job as plain values, for YAML: those that differ from the defaults."""
    values = {field.name: value for field in fields(Job) if (value := getattr(job, field.name)) != field.default}
    values["shape"] = _plain(job.shape)
    values |= {"replicas": asdict(job.replicas)} if "replicas" in values else {}
    if compared := values.get("comparison"):
        values["comparison"] = asdict(compared) | {"shape": compared.shape and _plain(compared.shape)}
    if images := values.get("images"):
        values["images"] = asdict(images) | {
            "each": list(images.each),
            "tower": asdict(images.tower) | {"shape": _plain(images.tower.shape)},
        }
    return {key: sorted(value) if isinstance(value, frozenset) else value for key, value in values.items()}


def _plain(shape: ModelShape) -> dict[str, Any]:
    family = {key: value for key, value in asdict(shape.family).items() if value != getattr(Family(), key)}
    return {key: value for key, value in asdict(shape).items() if value} | {"family": family}


def _shape_of_record(values: Mapping[str, Any]) -> ModelShape:
    shape = dict(values)
    shape |= {"family": Family(**shape.get("family", {})), "mixer": Mixer.of(shape.get("mixer"))}
    shape["sizes"] = LayerSizes.all_of(shape.get("sizes", ()))
    shape["projections"] = pairs(shape.get("projections", ()))
    measured = not shape.keys() <= {field.name for field in fields(ModelShape)}  # counted in the model's code
    return (MeasuredShape if measured else ModelShape)(**shape)


def job_of_record(values: Mapping[str, Any], place: str) -> Job:
    """Return the Job that record() wrote. Raises UserError at `place` for anything else."""
    try:
        known = {key: value for key, value in values.items() if key not in OLDER}
        known |= {"shape": _shape_of_record(values["shape"])}
        known["replicas"] = Replicas(**known.get("replicas", {}))
        compared = dict(known.get("comparison", {}))
        if compared.get("shape"):
            compared["shape"] = _shape_of_record(compared["shape"])
        known["comparison"] = Comparison(**compared)
        known["images"] = Images.of(known["images"]) if known.get("images") else None
        return Job(**known | {"kernels": frozenset(known.get("kernels", ()))})
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        problem = f"it is no configuration that this version of Brigade writes ({error})"
        raise UserError(place, problem, "run the recipe once more") from None
