"""What this machine lacks for a cluster of namespaces."""

import os
import shutil
import subprocess
import sys

# program -> Debian package
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux",
            "mount": "mount", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server",
            "nft": "nftables"}  # fmt: skip
SLURM = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
# Where Debian keeps what is not for everybody: not on every PATH, and never on a bare remote shell's.
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def missing(programs: dict[str, str] = PROGRAMS) -> list[str]:
    """One line for each thing that is missing, with its cure; empty where a cluster can be built."""
    if not sys.platform.startswith("linux"):
        return [f"hosts are Linux namespaces, and this is {sys.platform}: use a Linux machine"]
    lacks = []
    if os.geteuid() != 0:
        # A user namespace of one's own gives networks, mounts and host names, but no sshd: its privilege separation ends
        # with "setgroups: Operation not permitted" (OpenSSH 9.2).
        lacks.append("root: sshd changes its user and network cards are made; run it with sudo")
    packages = sorted({package for program, package in programs.items() if shutil.which(program) is None})
    if packages:
        names = ", ".join(program for program in programs if shutil.which(program) is None)
        lacks.append(f"{names}: apt-get install --no-install-recommends {' '.join(packages)}")
    if not lacks:
        probe = "ip link add probe0 type bridge && ip link add probe1 type veth peer name probe2"
        done = subprocess.run(["unshare", "--net", "sh", "-c", probe], capture_output=True, text=True)
        if done.returncode:
            lacks.append(
                f"namespaces with bridge and veth: {done.stderr.strip() or 'the kernel refuses'}; "
                "in a container give it CAP_NET_ADMIN and CAP_SYS_ADMIN, or use a virtual machine"
            )
    return lacks


def require() -> None:
    """Raises SystemExit(2), with what is missing on stderr, where no cluster can be built."""
    if lacks := missing():
        print("no cluster of hosts can be built here:", *lacks, sep="\n  ", file=sys.stderr)
        raise SystemExit(2)
