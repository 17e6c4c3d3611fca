"""What an out-of-memory error names as ways out (brigade/plan/runs/remedies.py): which files, and how a command takes a way."""

import re
import shlex

from .ranks import REPOSITORY
from .shipped import shipped

NEVER = {  # file -> why no run is told of it
    "ds_configs/zero3_nvme.json": "disks that nobody measured",
    "ds_configs/zeropp.json": "other losses",
    "ds_configs/zero3_hpz.json": "slow networks",
    **{f"accelerate_configs/ddp_{size}.yaml": "shards nothing" for size in ("1x2", "2x8")},
    **{f"accelerate_configs/zero3_{size}.yaml": "ds_configs/zero3.json is the same" for size in ("1x2", "2x8")},
}
FILES = [str(path.relative_to(REPOSITORY)) for path in shipped("*_configs/*") if path.suffix != ".md"]
NAMED = [file for file in FILES if file not in NEVER]


def flag_of(file: str) -> str:
    """Return the flag that takes a file of ds_configs/ or accelerate_configs/."""
    return "--ds_config" if file.startswith("ds_configs/") else "--accelerate_config"


def ways_of(cure: str) -> list[str]:
    """Return the ways that an error's last line names, each with what stands in brackets behind it."""
    return cure.split("the same command fits with ", 1)[1].split("; ")[0].split(", or with ")


def in_the_command(way: str, argv: list[str]) -> list[str]:
    """Return a command with the words of a way: further flags, and `instead of --FLAG`, which replaces one with its value."""
    argv, words = [*argv], shlex.split(re.sub(r" \([^()]*\)$", "", way))
    if "instead" in words:
        at = argv.index(words[-1])
        argv[at : at + 2], words = [], words[:-3]
    return [*argv, *words]
