"""Read the file in which users keep what they know of their own cluster: GPU kinds that hardware.yaml lacks, and factors.

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
import sys
from pathlib import Path
from typing import Any

from ...errors import UserError, did_you_mean, shown
from ...errors.tables import Fields
from ...train.recipe.files import CALIBRATION as VARIABLE
from ...train.recipe.files import calibration_file as where
from ...train.recipe.files import read_yaml

SECTIONS = ("gpus", "factors")
FACTORS = ("efficiency", "network")
NUMBERS = ("memory_gib", "bf16_tflops", "hbm_gb_s", "peer_gb_s", "pcie_gb_s", "sms")
OPTIONAL = ("matmul_tflops", "node_gbit", "sustained")
OF_GPU = (*NUMBERS, *OPTIONAL, "driver", "names", "source", "generation")


def named() -> str:
    """Return the file's name for messages."""
    return str(where() or f"a file that {VARIABLE} names")


def gpus() -> dict[str, Fields]:
    """Return the kinds of GPU that the user describes, as hardware.yaml does."""
    return once(where())["gpus"]


def factors(kind: str) -> dict[str, float]:
    """Return those of FACTORS that were measured for a kind of GPU: {"efficiency": 0.94, ...}"""
    return {name: entry["factor"] for name, entry in once(where())["factors"].get(kind, {}).items()}


def leave_aside_if_broken(host: str) -> None:
    """Take no file in this process if it cannot be used, for a run that needs no planner. Where a host is named, say so."""
    try:
        once(where())
    except (UserError, OSError) as error:
        os.environ[VARIABLE] = ""  # stands for none
        broken = f"{error.place}: {error.problem}" if isinstance(error, UserError) else str(error)
        if host:
            print(f"warning on {host}: {broken}; training goes on without this file", file=sys.stderr)


@functools.cache
def once(path: Path | None) -> Fields:
    """Read a file once in a process: to edit it while a run goes on does not disturb the run."""
    return read(path) if path else {"gpus": {}, "factors": {}}


def read(path: Path) -> Fields:
    """Return {"gpus": ..., "factors": ...} of a file. Raises UserError with the key for what does not belong there."""
    document: Fields = {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    if path.is_dir() or any(line.strip() and line[0] != "#" for line in lines):  # more than comments
        document = _table(read_yaml(path), f"{path}:", SECTIONS, "section")
    found = {name: _table(document.get(name) or {}, f"{path}: {name}") for name in SECTIONS}
    for kind, entry in found["gpus"].items():
        _check_gpu(entry, f"{path}: gpus.{kind}")
        found["gpus"][kind] = {"names": [], "source": str(path)} | entry
    for kind, measured in found["factors"].items():
        for name, entry in _table(measured, f"{path}: factors.{kind}", FACTORS, "factor").items():
            place = f"{path}: factors.{kind}.{name}"
            runs = _table(_table(entry, place).setdefault("runs", {}), f"{place}.runs")
            for key, value in {"factor": entry.get("factor"), **runs}.items():
                _check_positive(value, f"{place}: {key}")
    return found


def _check_gpu(entry: object, place: str) -> None:
    entry = _table(entry, place, OF_GPU, "key")
    for key in (*NUMBERS, *(key for key in OPTIONAL if key in entry)):
        _check_positive(entry.get(key), f"{place}.{key}")
    driver: Any = entry.get("driver")
    names = entry.get("names", [])
    try:
        re.compile(driver)
    except (TypeError, re.error):
        problem = f"{driver!r} is no regular expression"
        raise UserError(f"{place}.driver", problem, "give the whole name that the driver gives the GPU") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{place}.names", f"{names!r} is not a list of names", "give names that --gpu takes, or none")


def _table(value: object, place: str, known: tuple[str, ...] = (), what: str = "") -> Fields:
    """Return `value`, or raise UserError unless it is keys and values. known: the keys that it may have; what: their name"""
    if not isinstance(value, dict):
        cure = "see docs/compare-with-plan.md, or move the file away"
        raise UserError(place, f"{shown(value)} is not keys and values", cure)
    if known and (other := [key for key in value if key not in known]):
        between = " " if place.endswith(":") else "."
        raise UserError(f"{place}{between}{other[0]}", f"there is no such {what}", did_you_mean(str(other[0]), known))
    return value


def _check_positive(value: object, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(place, f"{value!r} is not a number above 0", "fix it, or move the file away")
