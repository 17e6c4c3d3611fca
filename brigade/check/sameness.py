"""Whether all hosts have the same: versions, code, variables, paths."""

from collections.abc import AsyncIterator

from .hosts import Hosts
from .registry import check
from .results import Result, most_common, sound


@check("packages")
async def packages(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the versions of Python and of the packages that a run is made of. Threshold: none differs from what most hosts have;
    DeepSpeed and Transformers exchange objects between ranks whose layout is that of one version."""
    names = most_common({host: tuple(hello["versions"]) for host, hello in hosts.hello.items()})
    for host, hello in hosts.hello.items():
        versions = hello["versions"]
        others = {name: most_common({h: hosts.hello[h]["versions"].get(name) for h in hosts.hello}) for name in names}
        odd = [
            f"{name} {versions.get(name)}, elsewhere {other}"
            for name, other in others.items()
            if versions.get(name) != other
        ]
        if not odd:
            yield sound(host, f"torch {versions['torch']}, ...")
            continue
        why = "ranks of two versions disagree about what they send each other, and hang or compute something else"
        yield Result(host, "red", odd[0], None, ", ".join(odd), why, f"ssh {host}, then `make setup` in the clone")
