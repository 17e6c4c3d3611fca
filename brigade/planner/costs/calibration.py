"""The file in which users keep what they know of their own cluster: GPU kinds that hardware.yaml lacks, and measured factors.

    gpus:                         # in hardware.yaml's format; they go before its own
      My GPU: {driver: "NVIDIA My GPU", memory_gib: 23.5, bf16_tflops: 100, hbm_gb_s: 900, peer_gb_s: 24, pcie_gb_s: 24, sms: 100}
    factors:                      # `python -m brigade plan --calibrate RUN ...` writes this section, and no other
      H100 80GB:
        efficiency: {factor: 0.94, runs: {/data/outputs/one: 0.93, /data/outputs/two: 0.95}}
        network: {factor: 0.71, runs: {/data/outputs/three: 0.71}}

efficiency: how fast a node is against the formulas, its inner links included. network: what nodes reach between them of the
bandwidth that the formulas suppose. The file is $BRIGADE_CALIBRATION, else ~/.config/brigade/calibration.yaml; an empty
variable stands for none. Without a file nothing changes.
"""

import functools
import math
import os
import re
from pathlib import Path
from typing import Any

from ...errors import UserError, did_you_mean
from ...errors.findings import shown
from ...recipe.files import read_yaml

VARIABLE = "BRIGADE_CALIBRATION"
FACTORS = ("efficiency", "network")
NUMBERS = ("memory_gib", "bf16_tflops", "hbm_gb_s", "peer_gb_s", "pcie_gb_s", "sms")
_OPTIONAL = ("names", "source", "matmul_tflops")


def where() -> Path | None:
    """The user's file, there or not; None where the environment asks for none."""
    named = os.environ.get(VARIABLE, "~/.config/brigade/calibration.yaml")
    return Path(named).expanduser() if named else None


def named() -> str:
    """The file's name in messages."""
    return str(where() or f"a file that {VARIABLE} names")


def gpus() -> dict[str, dict[str, Any]]:
    """Kinds of GPU that the user describes, as hardware.yaml does."""
    return _current()["gpus"]


def factors(kind: str) -> dict[str, float]:
    """{"efficiency": 0.94, ...} of a kind of GPU: what was measured, of FACTORS."""
    return {name: entry["factor"] for name, entry in _current()["factors"].get(kind, {}).items()}


_left_aside: set[Path | None] = set()


def left_aside() -> str:
    """For who needs no planner: leaves a file that cannot be used out of account in this process, and returns what is wrong
    with it, or ""."""
    try:
        _current()
    except (UserError, OSError) as error:
        _left_aside.add(where())
        return f"{error.place}: {error.problem}" if isinstance(error, UserError) else str(error)
    return ""


def _current() -> dict[str, Any]:
    path = where()
    return once(None if path in _left_aside else path)


@functools.cache
def once(path: Path | None) -> dict[str, Any]:
    """read(), once in a process: who edits the file while a run goes on does not disturb it."""
    return read(path) if path and path.exists() else {"gpus": {}, "factors": {}}


def read(path: Path) -> dict[str, Any]:
    """{"gpus": ..., "factors": ...} of a file. Raises UserError with the key for what does not belong there."""
    if path.is_file() and not any(
        line.strip() and line[0] != "#" for line in path.open(encoding="utf-8", errors="replace")
    ):
        return {"gpus": {}, "factors": {}}  # comments alone
    document = read_yaml(path)
    for section in document:
        if section not in ("gpus", "factors"):
            raise UserError(
                f"{path}: {section}", "there is no such section", did_you_mean(str(section), ("gpus", "factors"))
            )
    found = {name: _table(document.get(name) or {}, f"{path}: {name}") for name in ("gpus", "factors")}
    for kind, entry in found["gpus"].items():
        _check_gpu(entry, f"{path}: gpus.{kind}")
        entry.setdefault("names", [])
        entry.setdefault("source", str(path))
    for kind, measured in found["factors"].items():
        for name, entry in _table(measured, f"{path}: factors.{kind}").items():
            place = f"{path}: factors.{kind}.{name}"
            if name not in FACTORS:
                raise UserError(place, "there is no such factor", did_you_mean(str(name), FACTORS))
            entry = _table(entry, place)
            runs = _table(entry.setdefault("runs", {}), f"{place}.runs")
            for key, value in {"factor": entry.get("factor"), **runs}.items():
                _positive(value, f"{place}: {key}")
    return found


def _check_gpu(entry: Any, place: str) -> None:
    entry = _table(entry, place)
    for key in entry:
        if key not in (*NUMBERS, *_OPTIONAL, "driver"):
            raise UserError(
                f"{place}.{key}", "there is no such key", did_you_mean(str(key), (*NUMBERS, *_OPTIONAL, "driver"))
            )
    for key in (*NUMBERS, *(["matmul_tflops"] if "matmul_tflops" in entry else [])):
        _positive(entry.get(key), f"{place}.{key}")
    try:
        re.compile(entry.get("driver"))  # type: ignore[arg-type]
    except (TypeError, re.error):
        raise UserError(
            f"{place}.driver",
            f"{entry.get('driver')!r} is no regular expression",
            "give the whole name that the driver gives the GPU",
        ) from None
    names = entry.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{place}.names", f"{names!r} is not a list of names", "give names that --gpu takes, or none")


def _table(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(
            place, f"{shown(value)} is not keys and values", "see docs/compare-with-plan.md, or move the file away"
        )
    return value


def _positive(value: Any, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(place, f"{value!r} is not a number above 0", "mend it, or move the file away")
