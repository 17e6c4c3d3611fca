"""What only lint says of a hostfile, and of the file of variables that DeepSpeed's launcher sends along."""

from collections import Counter
from collections.abc import Iterator

from ..errors.findings import Finding
from .accelerate import LOOPBACK


def hostfile(hosts: dict[str, int], name: str) -> Iterator[Finding]:
    for host in hosts:
        if host.lower() in LOOPBACK and len(hosts) > 1:
            problem = f"{host!r} among {len(hosts)} hosts: for each of them it is another machine"
            yield Finding("hostfile-localhost", name, host, problem, "write the host's name, as the others reach it")
    counts = Counter(hosts.values()).most_common()
    for host, slots in hosts.items():
        if slots != counts[0][0]:
            usual = f"{counts[0][1]} of {len(hosts)} hosts have {counts[0][0]}"
            problem = f"{slots} slots on {host!r}, {usual}: accelerate and Slurm cannot start that"
            yield Finding("hostfile-unequal", name, host, problem, "give every host the same number of slots")
            return


def deepspeed_env(text: str, name: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        if "=" not in line or line.lstrip().startswith("#"):
            what = (
                "a comment"
                if line.lstrip().startswith("#")
                else "a blank line"
                if not line.strip()
                else "no NAME=value"
            )
            problem = f"{what}: DeepSpeed's launcher splits every line at `=`"  # its text may be a secret
            yield Finding("env-line", name, number, problem, "remove the line")
