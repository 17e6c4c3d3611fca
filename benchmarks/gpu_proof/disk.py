"""What the parts write, before they write it: is there room, and what goes away afterwards. Standard library only."""

import shutil
from pathlib import Path

GB = 1e9
# Of the checkpoints' part: two checkpoints of 4.5 GiB each, for the older one goes when the newer is whole, and the model.
CHECKPOINTS = 12 * GB
# Of a shape: its random weights in bf16, and what a full run saves in fp32.
PER_PARAMETER = {"full": 6, "lora": 2}
PARAMETERS = {"qwen3-0.6b": 0.6e9, "qwen3-1.7b": 1.7e9, "qwen3-8b": 8.2e9}
SPARE = 2 * GB  # for logs, data, caches of compiled kernels


def of_shape(model: str, method: str) -> float:
    """Return the bytes that a run of a shape takes while it lasts."""
    return PARAMETERS[model] * PER_PARAMETER[method]


def lacking(folder: Path, needed: float) -> str:
    """Return why a run is left out that writes so many bytes below a folder; "" where they fit."""
    free = shutil.disk_usage(folder).free
    if free >= needed + SPARE:
        return ""
    return f"no room: it writes {needed / GB:.0f} GB, and {free / GB:.0f} GB are free in {folder}"


def in_words(folder: Path) -> str:
    """Return what a user should know before the first part begins."""
    free, most = shutil.disk_usage(folder).free, max(of_shape(name, "full") for name in PARAMETERS)
    words = f"disk: {free / GB:.0f} GB free in {folder}; the largest model takes {most / GB:.0f} GB while it runs"
    return words if free >= max(most, CHECKPOINTS) + SPARE else f"{words}, and what has no room is left out"
