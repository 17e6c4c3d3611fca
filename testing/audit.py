"""`make audit`: which pins have published advisories. `python -m testing.audit FILE` reads these from a file, without a network.

FILE: records of the OSV schema (https://ossf.github.io/osv-schema/): the zip of all of PyPI that OSV publishes, or JSON: one
record, a list, or one a line. `--pins` prints what is looked for, for pip-audit.
"""

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

REPOSITORY = Path(__file__).resolve().parents[1]
_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;#\\]+)")


def pins(folder: Path = REPOSITORY) -> dict[str, set[str]]:
    """Package -> versions, of every file of pins that is kept in git."""
    named = subprocess.check_output(["git", "ls-files", "*.txt"], cwd=folder, text=True).split()
    found: dict[str, set[str]] = {}
    for file in (folder / name for name in named if "data" not in Path(name).parts):
        for line in file.read_text(encoding="utf-8").splitlines():
            if match := _PIN.match(line):
                found.setdefault(canonicalize_name(match[1]), set()).add(match[2])
    return found


def records(file: Path) -> Iterator[dict[str, Any]]:
    """The advisories of a file. Raises ValueError for what is none."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.endswith(".json"):
                    yield json.loads(archive.read(name))
        return
    text = file.read_text(encoding="utf-8")
    try:
        whole = json.loads(text)
    except ValueError:
        whole = [json.loads(line) for line in text.splitlines() if line.strip()]
    yield from whole if isinstance(whole, list) else [whole]


def affects(affected: dict[str, Any], version: str) -> bool:
    """Whether one `affected` entry of a record means a version: by its list of versions, or by its ranges of PEP 440's order."""
    at = Version(Version(version).public)  # a build's +cu130 is no later version
    if at in map(_place, affected.get("versions", [])):
        return True
    return any(_within(of.get("events", []), at) for of in affected.get("ranges", []) if of.get("type") == "ECOSYSTEM")


def _within(events: list[dict[str, str]], at: Version) -> bool:
    inside = False
    for event in sorted(events, key=lambda event: _place(next(iter(event.values())))):
        kind, where = next(iter(event.items()))
        if kind == "introduced" and at >= _place(where):
            inside = True
        elif (kind == "fixed" and at >= _place(where)) or (kind == "last_affected" and at > _place(where)):
            inside = False
    return inside


def _place(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:  # of long ago, or of nobody: it counts as the first one
        return Version("0.dev0")


def found(file: Path, pinned: dict[str, set[str]]) -> tuple[int, list[str]]:
    """Return (how many advisories were read, a line for each that means a pin)."""
    count, lines = 0, []
    for count, record in enumerate(records(file), 1):  # noqa: B007
        if "id" not in record:
            raise ValueError("a record has no id")
        for affected in record.get("affected", []) if "withdrawn" not in record else []:
            package = affected.get("package", {})
            name = canonicalize_name(package.get("name", ""))
            for version in sorted(pinned.get(name, ())) if package.get("ecosystem") == "PyPI" else ():
                if affects(affected, version):
                    fixed = [
                        e["fixed"] for of in affected.get("ranges", []) for e in of.get("events", []) if "fixed" in e
                    ]
                    cure = f"fixed in {', '.join(fixed)}" if fixed else "no version is known that fixes it"
                    lines.append(f"{name} {version}: {record['id']}: {record.get('summary', '')} ({cure})")
    return count, list(dict.fromkeys(lines))


def main(words: list[str]) -> int:
    """0: no pin is affected; 1: some are; 2: nothing was read."""
    pinned = pins()
    if words == ["--pins"]:  # without +cu130: an index knows the public version alone
        public = {f"{name}=={version.partition('+')[0]}" for name, versions in pinned.items() for version in versions}
        print(*sorted(public), sep="\n")
        return 0
    try:
        count, lines = found(Path(words[0]), pinned)
    except (IndexError, OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"error: no advisories were read: {error}", file=sys.stderr)
        print(
            "  cure: make audit ADVISORIES=FILE, with OSV's all.zip of PyPI; or make audit, with a network",
            file=sys.stderr,
        )
        return 2
    if not count:
        print(f"error: {words[0]} has no advisories\n  cure: name OSV's all.zip of PyPI", file=sys.stderr)
        return 2
    print(*lines, f"{count:,} advisories, {len(pinned)} packages: {len(lines) or 'none'} affected", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
