"""Hosts and slots: a hostfile, in DeepSpeed's syntax."""

import re
from pathlib import Path

from ...errors import UserError
from ...errors.findings import Finding, raise_first
from .files import text_of

_HOST_LINE = re.compile(r"^(\S+)\s+slots=(\d{1,6})$")
_NAME = re.compile(r"[\w.:%@+-]+")  # of a host, or of a user at a host, as ssh and DNS know them
_BOM = "\ufeff"  # Windows' editors put it before the first letter of a file
_EXAMPLE = "write one line per host: `node1 slots=8`"


def read_hostfile(path: Path) -> dict[str, int]:
    """Read hosts and their slots, in order, from a file in DeepSpeed's syntax (`HOST slots=N`, `#` comment lines).

    Raises UserError for a missing file, a byte order mark, a line of another form, a name that no host
    can have, or a host that stands there twice.
    """
    try:
        hosts, findings = parse_hostfile(text_of(path), str(path))
    except OSError as error:
        raise UserError(str(path), f"the hostfile cannot be read: {error.strerror or error}", _EXAMPLE) from None
    except UnicodeDecodeError:
        raise UserError(str(path), "the hostfile is not text", _EXAMPLE) from None
    raise_first(findings)
    return hosts


def parse_hostfile(text: str, name: str) -> tuple[dict[str, int], list[Finding]]:
    """Return the hosts and slots that a hostfile names, and what is wrong with its other lines."""
    hosts: dict[str, int] = {}
    findings: list[Finding] = []
    if text.startswith(_BOM):
        problem = "the file begins with a byte order mark, which DeepSpeed takes for a part of the first host's name"
        findings.append(
            Finding("hostfile-bom", name, 1, problem, f"take it out: `sed -i '1s/^\\xEF\\xBB\\xBF//' {name}`")
        )
    for number, line in enumerate(text.removeprefix(_BOM).splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _HOST_LINE.match(line)
        if not match or match[1].endswith(":") or int(match[2]) == 0:
            findings.append(_broken(line, name, number))
        elif not _NAME.fullmatch(match[1]):
            findings.append(_no_name(line, match[1], name, number))
        elif match[1].lower() in map(str.lower, hosts):  # as names are to DNS and ssh
            problem = f"host {match[1]!r} stands here twice"
            findings.append(Finding("hostfile-duplicate", name, number, problem, "keep one line per host"))
        else:
            hosts[match[1]] = int(match[2])
    if not hosts and not findings:
        findings.append(Finding("hostfile-empty", name, "", "the hostfile names no host", _EXAMPLE))
    return hosts, findings


def _no_name(line: str, host: str, name: str, number: int) -> Finding:
    bare = host.strip("\"'`")
    cure = _EXAMPLE
    if _NAME.fullmatch(bare):
        cure = f"write `{line.replace(host, bare)}`"
    elif "[" in host:
        cure = f"`scontrol show hostnames '{bare}'` lists them where there is Slurm; {_EXAMPLE}"
    return Finding("hostfile-name", name, number, f"{line!r}: {host!r} is no name of a host", cure)


def _broken(line: str, name: str, number: int) -> Finding:
    without_comment = line.partition(" #")[0].rstrip()
    fixed = re.sub(r"^(\S+?):+\s", r"\1 ", without_comment)
    rule = "hostfile-slots"
    match = _HOST_LINE.match(fixed)
    if match and int(match[2]):
        rule = "hostfile-colon" if fixed != without_comment else "hostfile-comment"
    cure = f"write for example `{'node1 slots=8' if rule == 'hostfile-slots' else fixed}`"
    return Finding(rule, name, number, f"{line!r} is not `HOST slots=N`", cure)
