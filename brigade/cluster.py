"""Hosts, slots and ranks: what the launcher started, and the hostfile's grammar."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import UserError


@dataclass(frozen=True)
class World:
    """The place of this process among the ranks of the run.

    launcher: "python" (nothing started us), "torchrun", "deepspeed" or "accelerate".
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    host: str
    launcher: str

    @property
    def hosts(self) -> int:
        """Number of hosts, assuming that each runs as many ranks as this one."""
        return max(1, self.size // self.local_size)

    @property
    def speaks(self) -> bool:
        """True on the one rank that prints."""
        return self.rank == 0


def world_from_environment(env: Mapping[str, str] | None = None) -> World:
    """Read what torchrun, deepspeed or accelerate put into the environment.

    deepspeed says LOCAL_SIZE where torchrun says LOCAL_WORLD_SIZE; accelerate launch is torchrun with
    ACCELERATE_MIXED_PRECISION set. Without RANK nothing launched us: one process, one device.
    """
    env = os.environ if env is None else env
    host = socket.gethostname()
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return World(0, 0, 1, 1, host, "python")
    size = int(env["WORLD_SIZE"])
    if "ACCELERATE_MIXED_PRECISION" in env:
        launcher = "accelerate"
    elif "TORCHELASTIC_RUN_ID" in env:
        launcher = "torchrun"
    elif "CROSS_SIZE" in env:
        launcher = "deepspeed"
    else:
        launcher = "environment"
    local_size = int(env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE") or size)
    return World(int(env["RANK"]), int(env.get("LOCAL_RANK", 0)), size, local_size, host, launcher)


_HOST_LINE = re.compile(r"^(\S+)\s+slots=(\d+)\s*$")


def read_hostfile(path: Path) -> dict[str, int]:
    """Hosts and their slots, in order, from a file in DeepSpeed's syntax (`HOST slots=N`, `#` comment lines).

    Raises UserError for a missing file, a line of another form, or a host that stands there twice.
    """
    if not path.is_file():
        raise UserError(str(path), "there is no such hostfile", "write one line per host: `node1 slots=8`")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError(str(path), "the hostfile is not text", "write one line per host: `node1 slots=8`") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _HOST_LINE.match(line.strip())
        place = f"{path}, line {number}"
        if not match or match[1].endswith(":") or int(match[2]) == 0:
            raise UserError(place, f"{line.strip()!r} is not `HOST slots=N`", "write for example `node1 slots=8`")
        if match[1] in hosts:
            raise UserError(place, f"host {match[1]!r} stands here twice", "keep one line per host")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise UserError(str(path), "the hostfile names no host", "write one line per host: `node1 slots=8`")
    return hosts
