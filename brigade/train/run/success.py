"""The marker of a run that succeeded: what it says of the model, and whether that is still so."""

import json
from pathlib import Path

from ...errors.tables import Fields
from ..host import checksums, files

SUCCESS = "success.json"


def of_model(directory: Path) -> Fields:
    """Return {"model": {name: bytes}, "samples": {name: checksum}} of the weights in a finished run's directory."""
    names = "*.safetensors", "global_step*/*", "pytorch_model_fsdp_0/*"
    found = sorted(path for name in names for path in directory.glob(name) if path.is_file())
    named = {str(path.relative_to(directory)): path for path in found}
    sizes = {name: path.stat().st_size for name, path in named.items()}
    return {"model": sizes, "samples": {name: checksums.of_samples(path) for name, path in named.items()}}


def unfinished(directory: Path) -> str:
    """Return why the run in a directory has not finished, in words: there is no marker, it is not what was written, or the model
    that it speaks of is not whole. "" where it has.

    Markers of earlier versions name no files of the model, or have no checksums of samples of them: nothing is known of these.
    """
    if not (directory / SUCCESS).exists():
        return f"there is no {SUCCESS}"
    try:
        marker = json.loads(files.read(directory / SUCCESS))
        samples = marker.get("samples", {})
        for name, size in marker.get("model", {}).items():
            there = (directory / name).stat().st_size if (directory / name).is_file() else None
            if there != size:
                return f"{name} is missing" if there is None else f"{name} has {there:,} bytes of {size:,}"
            if samples.get(name) and checksums.of_samples(directory / name) != samples[name]:
                return f"{name} is not what was written"
    except (OSError, ValueError, RecursionError, AttributeError):
        return f"{SUCCESS} is not what was written"
    return ""
