"""Which variables of the launching shell the ranks of all hosts get: those that forwarded.yaml lists.

`deepspeed` hands on only NCCL_*, PYTHON*, MV2*, UCX* and MLFLOW*, so that HF_HOME or a proxy holds on the first host only
(ArcticTraining #316); handing on everything would take one host's own settings to all others (a Slurm job's, a session's).
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from ..errors import UserError
from ..errors.tables import table


def forwarded(env: Mapping[str, str], extra: list[str]) -> dict[str, str]:
    """The variables of `env` that travel. extra: further names, as given with --env.

    Raises UserError for a name that env does not have, and for NAME=VALUE: every user of a host reads its command lines.
    """
    patterns = table(Path(__file__).with_name("forwarded.yaml"))
    for word in extra:
        name, equals, _ = word.partition("=")
        if equals:
            problem = "a value on a command line can be read by every user of this host"
            raise UserError(f"flag --env {name}=...", problem, f"export {name}, then give --env {name}")
        if name not in env:
            raise UserError(f"flag --env {name}", f"{name} is not set here", f"export {name}")

    def matches(name: str, group: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns[group])

    travels = {name for name in env if matches(name, "forwarded") and not matches(name, "kept")}
    return {name: value for name, value in env.items() if name in travels.union(extra)}
