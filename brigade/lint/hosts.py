"""What only lint says of a hostfile, and of the file of variables that DeepSpeed's launcher sends along."""

from collections import Counter
from collections.abc import Iterator

from ..errors.findings import Finding
from .accelerate import LOOPBACK


def hostfile(hosts: dict[str, int], name: str) -> Iterator[Finding]:
    for host in hosts:
        if host.lower() in LOOPBACK and len(hosts) > 1:
            yield Finding.of("hostfile-localhost", name, host, host=host, count=len(hosts))
    ((usual, most),) = Counter(hosts.values()).most_common(1) or [(0, 0)]
    for host, slots in hosts.items():
        if slots != usual:
            values = {"slots": slots, "host": host, "most": most, "count": len(hosts), "usual": usual}
            yield Finding.of("hostfile-unequal", name, host, **values)
            return


def deepspeed_env(text: str, name: str) -> Iterator[Finding]:
    """A finding per line that is no NAME=value; none shows the line, for its text may be a secret."""
    for number, line in enumerate(text.splitlines(), 1):
        is_comment = line.lstrip().startswith("#")
        if "=" not in line or is_comment:
            what = "a comment" if is_comment else "no NAME=value" if line.strip() else "a blank line"
            yield Finding.of("env-line", name, number, what=what)
