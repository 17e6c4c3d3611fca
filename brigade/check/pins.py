"""Versions of packages, against requirements.txt and constraints.txt where they pin, else against what most hosts have."""

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ..errors.console import counted
from ..hosts.host_facts import PACKAGES
from ..train.recipe.files import REPOSITORY
from .results import Result, most_common, sound

FILES = ("requirements.txt", "constraints.txt")
_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;#]+)")
Versions = Mapping[str, str | None]  # package -> version, None where it is missing
SHOWN = 4  # packages that a sentence names
WHY_RED = "ranks of two versions disagree about what they send each other: they hang, or compute something else"
WHY = "the tests passed with the pinned version alone"


@cache
def pins(folder: Path = REPOSITORY) -> dict[str, str]:
    """Package -> the one version that the files allow."""
    lines = (line for name in FILES for line in (folder / name).read_text(encoding="utf-8").splitlines())
    return {found[1]: found[2] for line in lines if (found := _PIN.match(line))}


def meets(version: str | None, pin: str) -> bool:
    """PEP 440: 2.13.0+cpu meets a pin on 2.13.0, but not the other way round."""
    return version is not None and (version == pin or ("+" not in pin and version.partition("+")[0] == pin))


@dataclass
class Differences:
    """What of one host's packages differs. wanted: package -> the version to install, of all that differ"""

    red: list[str] = field(default_factory=list)
    yellow: list[str] = field(default_factory=list)
    wanted: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, version: str | None, wanted: str, grave: bool, reference: str) -> None:
        self.wanted[name] = wanted
        words = f"{name} {version or 'is missing'}, {reference}"
        (self.red if grave else self.yellow).append(words)


def differences(hosts: Mapping[str, Versions], pinned: Mapping[str, str]) -> dict[str, Differences]:
    """Host -> what differs there.

    Red are the packages that ranks exchange things with (host_facts.PACKAGES) where hosts disagree. A package that all hosts lack
    is none that a run needs: tests want it. All hosts with the same other version agree, but no test has seen it.
    """
    found = {host: Differences() for host in hosts}
    for name in pinned:
        versions = {host: packages.get(name) for host, packages in hosts.items()}
        agree = len(set(versions.values())) == 1
        right = {host: version for host, version in versions.items() if meets(version, pinned[name])}
        usual = most_common(right) if right else None
        for host, version in versions.items():
            if host not in right and not (agree and version is None and name not in PACKAGES):
                reference = f"pinned {pinned[name]}"
                found[host].add(name, version, usual or pinned[name], name in PACKAGES and not agree, reference)
            elif host in right and usual and version != usual:
                found[host].add(name, version, usual, name in PACKAGES, f"elsewhere {usual}")
    return found


def judge(host: str, versions: Versions, differs: Differences) -> list[Result]:
    """One result, or one for each level."""
    detail = tuple(f"{name} {version}" for name, version in versions.items() if version is not None)
    if not differs.wanted:
        missing = sum(version is None for version in versions.values())
        without = f", {missing} not installed" if missing else ""
        return [sound(host, f"torch {versions.get('torch')}, {counted(len(versions), 'pin')}{without}", detail=detail)]
    fix, builds = _install(versions, differs.wanted)
    cure = f"`make setup` in {REPOSITORY} on {host}{', or --fix --yes' if fix else ''}"
    if builds:
        cure = f"install {', '.join(builds)} from the index that the other hosts' came from, for PyPI has no such build"
        cure += "; the rest: --fix --yes" if fix else ""
    found = []
    for level, words, why in (("red", differs.red, WHY_RED), ("yellow", differs.yellow, WHY)):
        if words:
            more = f", and {counted(len(words) - SHOWN, 'more package')}" if len(words) > SHOWN else ""
            problem = "; ".join(words[:SHOWN]) + more
            found.append(Result(host, level, words[0], None, problem, why, cure, fix, detail))  # type: ignore[arg-type]
    return found


def incomplete(host: str, lost: Mapping[str, str], versions: Versions) -> Result:
    """Of packages that are installed by their metadata, and not on the disk. lost: package -> which file it lacks"""
    words = "; ".join(f"{name} is installed, but {what}" for name, what in list(lost.items())[:SHOWN])
    more = f", and {counted(len(lost) - SHOWN, 'more package')}" if len(lost) > SHOWN else ""
    again = [f"{name}=={version}" for name in lost if (version := versions.get(name))]
    where, python = shlex.quote(str(REPOSITORY)), shlex.quote(sys.executable)
    fix = f"cd {where} && {python} -m pip install --disable-pip-version-check --quiet --force-reinstall --no-deps "
    public = all("+" not in name for name in again)
    why = "every rank of this host would end as it starts"
    cure = f"`make clean setup` in {REPOSITORY} on {host}{', or --fix --yes' if public else ''}"
    return Result(
        host, "red", "files are lost", None, words + more, why, cure, fix + shlex.join(again) if public else ""
    )


def _install(versions: Versions, wanted: Mapping[str, str]) -> tuple[str, list[str]]:
    """A shell line, "" where none helps, and the builds (2.13.0+cu128) that PyPI cannot serve. Of those the line asks for the
    version alone; where that is there already, pip would do nothing."""
    builds = [f"{name}=={version}" for name, version in wanted.items() if "+" in version]
    public = {name: version.partition("+")[0] for name, version in wanted.items()}
    install = [f"{name}=={version}" for name, version in public.items() if not meets(versions.get(name), version)]
    where, python = shlex.quote(str(REPOSITORY)), shlex.quote(sys.executable)
    line = f"cd {where} && {python} -m pip install --disable-pip-version-check --quiet {shlex.join(install)}"
    return line if install else "", builds
