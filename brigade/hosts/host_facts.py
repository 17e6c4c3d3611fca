"""What there is to see on a host: what it has, who it is, which processes belong to a run. Needs only the standard library."""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ..errors.versions import installed
from ..train.distributed import devices, visible
from ..train.distributed.devices import KFD
from ..train.distributed.supervised import RUN
from ..train.host import files
from ..train.run import on_disk
from . import Facts

PACKAGES = ("torch", "deepspeed", "accelerate", "transformers", "datasets", "peft")
PROJECT = Path(__file__).resolve().parents[2]
SIOCGIFADDR = 0x8915


def look_around() -> Facts:
    """Say who this host is and what it has."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    versions |= {package: installed(package) or "missing" for package in PACKAGES}
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = str(Path("/proc/self/ns/net").readlink())  # containers of one machine are hosts too
    return {
        "host": socket.gethostname(),
        "machine": f"{boot} {network}",
        "versions": versions,
        "project": project_hash(),
        "gpus": gpus(),
        "addresses": addresses(),
    }


def project_hash() -> str:
    """A hash of train.py and the library, by which two hosts with different clones are told apart."""
    digest = hashlib.sha256()
    for path in _project_files():
        digest.update(path.relative_to(PROJECT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def file_hashes(also: Iterable[str] = ()) -> dict[str, str]:
    """Return path -> hash of each file behind project_hash(), and of what else matches a pattern in the clone."""
    paths = [*_project_files(), *(path for pattern in also for path in sorted(PROJECT.glob(pattern)))]
    return {path.relative_to(PROJECT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in paths}


def _project_files() -> list[Path]:
    found = sorted([PROJECT / "train.py", *(PROJECT / "brigade").rglob("*")])
    return [path for path in found if path.suffix in (".py", ".yaml", ".jinja")]


def gpus() -> int | None:
    """Number of GPUs of this host: 0 without any, None when nvidia-smi does not answer. Without it, what else of NVIDIA's driver
    is there counts them. AMD's count whatever torch is: a rank that does not see them is refused."""
    if not shutil.which("nvidia-smi"):
        return devices.count_by_driver() or devices.count_of_amd(KFD)
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30, check=True)
        return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    return None


# Each device multiplies ones, whose sums are known, on torch's own path to it.
_COMPUTE = """
import sys, torch
wanted = int(sys.argv[1])
found = torch.cuda.device_count()
if found < wanted:
    sys.exit(f"torch sees {found} of its {wanted} GPUs")
for number in range(found):
    ones = torch.ones(2048, 2048, device=f"cuda:{number}")
    if (ones @ ones != 2048).any().item():
        sys.exit(f"GPU {number} computes wrongly")
"""


def devices_fail(handed_on: str | None = None) -> str:
    """Say what is wrong with the GPUs that ranks may use here, "" where each computes or where there is none: others may be
    somebody else's. Takes some ten seconds.

    handed_on: CUDA_VISIBLE_DEVICES of the run; None: this host's own counts, if it has one
    """
    count = gpus()
    if count is None:
        return "its nvidia-smi fails or does not answer"
    environment = os.environ | ({} if handed_on is None else {visible.VISIBLE: handed_on})
    if visible.VISIBLE in environment:
        count = min(count, len(visible.entries(environment[visible.VISIBLE])))
    if not count:
        return ""
    command = [sys.executable, "-c", _COMPUTE, str(count)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    except subprocess.TimeoutExpired:
        return "its GPUs do not finish a product of two matrices within 120 s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["its GPUs cannot be used"])[-1][:200]


def progress(directory: Path) -> Facts:
    """Say how far the run in an output directory is.

    checkpoint: step of the newest checkpoint that was written to its end; step: the last on record in events.jsonl
    started, first: when the newest attempt went on, and after which step, where that is among the last lines
    stopped: who stopped it in good order, of stopped.json; stop: the file that asks for a stop is there
    finished: changes when success.json is written anew, whatever this host's clock says
    What is not there, or not to be seen from this host, is left out.
    """
    found: Facts = {}
    steps = on_disk.whole_checkpoints(directory)
    if steps:
        found["checkpoint"] = max(steps)
    with suppress(OSError), files.opened(directory / "events.jsonl") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
        for line in file.read().splitlines():
            with suppress(ValueError, RecursionError, TypeError, KeyError):
                event = json.loads(line)
                found["step"] = int(event["step"])
                if event["event"] == "started":
                    found |= {"started": str(event["time"]), "first": found["step"]}
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        found["stopped"] = str(json.loads(files.read(directory / "stopped.json"))["by"])
    with suppress(OSError):
        found |= {"stop": True} if (directory / "stop").exists() else {}
        status = (directory / "success.json").stat()
        found["finished"] = f"{status.st_mtime_ns} {status.st_ino}"
    return found


def addresses() -> dict[str, str]:
    """Return IPv4 and global IPv6 address -> interface, without the loopback."""
    interface_of = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                packed = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                interface_of[socket.inet_ntoa(packed[20:24])] = name
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == "00":  # global
                interface_of[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = name
    return {address: name for address, name in interface_of.items() if not address.startswith("127.")}


def holder(port: int) -> str | None:
    """`PID COMMAND` of the process that listens on a TCP port of this host, if this user may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if int(words[1].rpartition(":")[2], 16) == port and words[3] == "0A":
                    inodes.add(f"socket:[{words[9]}]")
    for entry in _processes():
        with suppress(OSError):
            if any(str(link.readlink()) in inodes for link in (entry / "fd").iterdir()):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f"process {entry.name} ({command.strip()[:80]})"
    return None


def processes(run: str) -> list[int]:
    """Every process of this user on this host that belongs to the run, whoever its parent became."""
    mark, pids = f"{RUN}={run}".encode(), []
    for entry in _processes():
        with suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and mark in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return [pid for pid in pids if pid != os.getpid()]


def of_session(leader: int) -> list[int]:
    """The other processes of a session: those that its leader has started and that began no session of their own (setsid). An
    empty list where the number belongs to another process by now: it cannot be that of a session that still has members."""
    pids = []
    for entry in _processes():
        with suppress(OSError):
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                pids.append(int(entry.name))
    return [pid for pid in pids if pid != leader] if leader == os.getpid() or leader not in pids else []


def _processes() -> Iterator[Path]:
    return (entry for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def send(pids: list[int], number: int) -> None:
    """Send a signal to those of the processes that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
