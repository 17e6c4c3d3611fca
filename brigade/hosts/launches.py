"""Records of launches that were started here, one for each output directory and launching host.

{"output", "logs", "host", "hosts" (of the run), "pid", "born" (when that process began, in ticks since its host's start),
"started", "code" once it has ended}. They lie in the cache; records of directories that are gone are removed.
"""

import hashlib
import json
import socket
from contextlib import suppress
from pathlib import Path

from ..errors.tables import Fields
from ..train.host import files, processes
from ..train.host.cache import cache_directory


def hosts() -> set[str]:
    """The hosts that launches of this user went to from here, as far as records tell."""
    return {str(host) for record in records() for host in record.get("hosts", ())}


def alive(record: Fields) -> bool:
    """Tell whether a launch still goes on, as far as it can be seen from this host."""
    if "code" in record:
        return False
    if record["host"] != socket.gethostname():
        return True
    began = born(record["pid"])
    return began != 0 and began == record.get("born", began)


def path_of(output: Path) -> Path:
    """The file of the record for an output directory."""
    name = f"{socket.gethostname()} {output}"  # the cache may be one for several hosts
    return cache_directory("launches") / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def records() -> list[Fields]:
    """The records of all launches whose logs are still there."""
    kept = []
    for path in sorted(cache_directory("launches").glob("*.json")):
        with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
            record = json.loads(files.read(path))
            if Path(record["logs"]).exists() or alive(record):
                kept.append(record)
            else:
                path.unlink()
    return kept


def born(pid: int) -> int:
    """Return when a process of this host began, 0 where there is none. The number itself may be another process's by now."""
    return int("".join(processes.status(pid)[19:20]) or 0)
