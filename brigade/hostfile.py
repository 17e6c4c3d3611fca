"""Hosts and slots: a hostfile, in DeepSpeed's syntax."""

import re
from pathlib import Path

from .errors import UserError
from .errors.findings import Finding, raise_first

_HOST_LINE = re.compile(r"^(\S+)\s+slots=(\d{1,6})$")
_EXAMPLE = "write one line per host: `node1 slots=8`"


def read_hostfile(path: Path) -> dict[str, int]:
    """Hosts and their slots, in order, from a file in DeepSpeed's syntax (`HOST slots=N`, `#` comment lines).

    Raises UserError for a missing file, a line of another form, or a host that stands there twice.
    """
    if not path.is_file():
        raise UserError(str(path), "there is no such hostfile", _EXAMPLE)
    try:
        hosts, findings = parse_hostfile(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise UserError(str(path), "the hostfile is not text", _EXAMPLE) from None
    raise_first(findings)
    return hosts


def parse_hostfile(text: str, name: str) -> tuple[dict[str, int], list[Finding]]:
    """The hosts and slots that a hostfile names, and what is wrong with its other lines."""
    hosts: dict[str, int] = {}
    findings: list[Finding] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _HOST_LINE.match(line)
        if not match or match[1].endswith(":") or int(match[2]) == 0:
            findings.append(_broken(line, name, number))
        elif match[1] in hosts:
            problem = f"host {match[1]!r} stands here twice"
            findings.append(Finding("hostfile-duplicate", name, number, problem, "keep one line per host"))
        else:
            hosts[match[1]] = int(match[2])
    if not hosts and not findings:
        findings.append(Finding("hostfile-empty", name, "", "the hostfile names no host", _EXAMPLE))
    return hosts, findings


def _broken(line: str, name: str, number: int) -> Finding:
    without_comment = line.partition(" #")[0].rstrip()
    fixed = re.sub(r"^(\S+?):+\s", r"\1 ", without_comment)
    rule = "hostfile-slots"
    if (match := _HOST_LINE.match(fixed)) and int(match[2]):
        rule = "hostfile-colon" if fixed != without_comment else "hostfile-comment"
    cure = f"write for example `{'node1 slots=8' if rule == 'hostfile-slots' else fixed}`"
    return Finding(rule, name, number, f"{line!r} is not `HOST slots=N`", cure)
