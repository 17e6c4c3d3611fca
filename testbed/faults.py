"""What goes wrong on clusters, as a table: how each fault is brought about, and what `launch` must say of it.

tests/cluster/test_faults.py tries each once, benchmarks/faults.py measures the time to the verdict.
"""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cluster import PROJECT, Cluster

INJECTED = PROJECT / "tests" / "ranks" / "bad_input"  # its sitecustomize.py lets ranks fail
RUNNING = "step 2/"
LATER = 5  # seconds that a rank may come to the rendezvous after the first; how long the first takes is the machine's affair
LONG = "--max_steps 5000 --logging_steps 1 --max_train_samples 100 --max_eval_samples 2 --eval_steps 5000 --save_steps 5000"


@dataclass
class Attempt:
    """One launch into one fault. said: stdout and stderr; seconds: from the fault to the end of the launch."""

    cluster: Cluster
    process: subprocess.Popen[bytes]
    output: Path
    code: int = 0
    seconds: float = 0.0

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace")


@dataclass(frozen=True)
class Fault:
    """what: for people; says: patterns that the verdict must show; code: exit code of launch
    arrange: before the launch; strike: once it trains; repair: afterwards; gone: the launch cannot speak any more"""

    what: str
    says: tuple[str, ...]
    code: int = 1
    arrange: Callable[[Cluster], None] | None = None
    strike: Callable[[Attempt], None] | None = None
    repair: Callable[[Cluster], None] | None = None
    launcher: str = "torchrun"
    words: str = ""
    slots: int = 1
    hostfile: str = ""
    variables: dict[str, Any] = field(default_factory=dict)
    gone: bool = False


def provoke(cluster: Cluster, fault: Fault, patience: float = 300) -> Attempt:
    """Launch into a fault and wait for the end, of the launch and of everything that it started on any host.

    Raises TimeoutError when either does not come within `patience` seconds.
    """
    folder = cluster.shared / f"fault-{time.monotonic_ns()}"
    folder.mkdir()
    if fault.arrange:
        fault.arrange(cluster)
    try:
        hostfile = fault.hostfile or str(cluster.hostfile(fault.slots))
        command = [
            sys.executable,
            "-m",
            "brigade",
            "launch",
            "recipes/tiny/full.yaml",
            "--hostfile",
            hostfile,
            "--launcher",
            fault.launcher,
            "--log_dir",
            str(folder / "logs"),
            *fault.words.split(),
            *LONG.split(),
            "--output_dir",
            str(folder / "run"),
        ]
        before = {pid for host in cluster for pid in host.processes()}
        begun = time.monotonic()
        with (folder / "said").open("wb") as out:
            process = cluster.hosts[0].popen(
                command, stdout=out, stderr=out, **{"OMP_NUM_THREADS": "1"} | fault.variables
            )
        attempt = Attempt(cluster, process, folder / "said")
        if fault.strike:
            while RUNNING not in attempt.said:
                if process.poll() is not None or time.monotonic() - begun > patience:
                    raise TimeoutError(f"{fault.what}: it never trained:\n{attempt.said[-3000:]}")
                time.sleep(0.05)
            begun = time.monotonic()
            fault.strike(attempt)
        while process.poll() is None or any(host.processes().keys() - before for host in cluster):
            if time.monotonic() - begun > patience:
                left = {host.name: host.processes() for host in cluster}
                raise TimeoutError(f"{fault.what}: no end after {patience:.0f} s: {left}\n{attempt.said[-3000:]}")
            time.sleep(0.1)
        attempt.code, attempt.seconds = process.returncode, time.monotonic() - begun
        return attempt
    finally:
        if fault.repair:
            fault.repair(cluster)
        cluster.heal()


def misses(fault: Fault, attempt: Attempt) -> list[str]:
    """What the launch should have said, and did not."""
    return [pattern for pattern in fault.says if not re.search(pattern, attempt.said)]


# ---- how to bring them about ------------------------------------------------------------------------------------
def _cut_node2(cluster: Cluster) -> None:
    cluster["node2"].cut()


def _other_key(cluster: Cluster) -> None:
    keys = cluster["node2"].directory / "ssh" / "authorized_keys"
    shutil.copy(cluster["node1"].directory / "ssh" / "host_key.pub", keys)


def _right_key(cluster: Cluster) -> None:
    shutil.copy(cluster.home / ".ssh" / "id_ed25519.pub", cluster["node2"].directory / "ssh" / "authorized_keys")


def _one_gpu_each(cluster: Cluster) -> None:
    """A driver's tool that lists one GPU, on both hosts."""
    tools = cluster.shared / "driver"
    tools.mkdir(exist_ok=True)
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-0)'\n")
    (tools / "nvidia-smi").chmod(0o755)
    for host in cluster:
        host.path = f"{tools}:{host.path}"
        host.environment(**host.variables)


def _no_gpu(cluster: Cluster) -> None:
    for host in cluster:
        host.path = host.path.removeprefix(f"{cluster.shared / 'driver'}:")
        host.environment(**host.variables)


def _occupy_port(cluster: Cluster) -> None:
    program = "import signal,socket; s=socket.create_server(('',29511)); signal.pause()"
    cluster["node1"].popen(["python3", "-c", program])
    while cluster["node1"].run(": < /dev/tcp/127.0.0.1/29511", check=False).returncode:
        time.sleep(0.02)


def _free_port(cluster: Cluster) -> None:
    cluster["node1"].kill("29511")


def _block_port(cluster: Cluster) -> None:
    cluster["node1"].block(29500, "in")


def _other_clone(cluster: Cluster) -> None:
    edited = cluster.shared / "edited_train.py"
    edited.write_text((PROJECT / "train.py").read_text() + "\n# edited here alone\n")
    cluster["node2"].bind(edited, PROJECT / "train.py")


def _same_clone(cluster: Cluster) -> None:
    cluster["node2"].unbind(PROJECT / "train.py")


def training_process(cluster: Cluster, host: str) -> int:
    """The process in which train.py trains on a host with one rank: the youngest of launcher, watcher and trainer."""
    return cluster[host].find("train.py")[-1]


def _signal_rank(attempt: Attempt) -> None:
    import os

    os.kill(training_process(attempt.cluster, "node2"), signal.SIGKILL)


def _power_off_node2(attempt: Attempt) -> None:
    attempt.cluster["node2"].power_off()


def _power_off_node1(attempt: Attempt) -> None:
    attempt.cluster["node1"].power_off()


def _cut_link(attempt: Attempt) -> None:
    attempt.cluster["node2"].cut()


def _kill_agent(attempt: Attempt) -> None:
    attempt.cluster["node2"].kill("brigade.launch.agent")


def _kill_deepspeed(attempt: Attempt) -> None:
    attempt.cluster["node2"].kill("deepspeed.launcher.launch")


def _signal_launch(number: int) -> Callable[[Attempt], None]:
    def strike(attempt: Attempt) -> None:
        with suppress(ProcessLookupError):
            attempt.cluster["node1"].send(attempt.process, number)

    return strike


def _ctrl_c_twice(attempt: Attempt) -> None:
    for _ in range(2):
        attempt.cluster["node1"].send(attempt.process, signal.SIGINT)
        time.sleep(0.1)


def _tiny_disk(cluster: Cluster) -> None:
    cluster["node2"].run(f"mkdir -p {TINY} && mount -t tmpfs -o size=64k tmpfs {TINY}")


def _no_tiny_disk(cluster: Cluster) -> None:
    cluster["node2"].run(f"umount {TINY}")


TINY = "/run/tiny"  # a disk that fills at once, on one host
_FAILING_RANK: dict[str, Any] = {"PYTHONPATH": str(INJECTED)}
FAULTS: dict[str, Fault] = {
    "missing-hostfile": Fault("the hostfile does not exist", (r"error: flag --hostfile", r"nowhere"), 2, hostfile="nowhere"),
    "unreachable": Fault("a host cannot be reached", (r"error: node2", r"timed out|No route"), 2, _cut_node2),
    "wrong-key": Fault("a host refuses the ssh key", (r"error: node2", r"Permission denied", r"ssh-copy-id node2"), 2,
                       _other_key, repair=_right_key),
    "slots": Fault("more slots than devices", (r"2 hosts do not fit|error: node1", r"slots=2 in the hostfile, but it has 1 GPU"),
                   2, _one_gpu_each, repair=_no_gpu, slots=2),
    "port-in-use": Fault("the given port is in use", (r"error: port 29511 on node1", r"in use by process \d+ \(python3"), 2,
                         _occupy_port, repair=_free_port, words="--master_port 29511"),
    "port-blocked": Fault("a firewall drops the port", (r"error: node2", r"cannot reach node1 on port 29500", r"10\.77\.0\.1"), 2,
                          _block_port),
    "other-clone": Fault("a host has another clone", (r"error: node2", r"another clone than on node1"), 2, _other_clone,
                         repair=_same_clone),
    "raises": Fault("a rank raises", (r"error: node2, rank 1 failed first", r"ValueError: the third step fails on this rank"),
                    variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "step", "BRIGADE_TEST_FAILED_AT": "/dev/null"}),
    "hangs-at-start": Fault("a rank hangs at start", (r"error: node2, rank 1 failed first", r"did not get to the rendezvous"),
                            words=f"--start_timeout {LATER}", variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "hang"}),
    "raises-among-others": Fault("one of several ranks of a host raises", (
        r"error: node1, rank 1 failed first\n", r"ValueError: the third step fails on this rank"), slots=2,
        variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "step", "BRIGADE_TEST_FAILED_AT": "/dev/null"}),
    "no-marker": Fault("all ranks end with exit code 0, but train.py did not reach its end", (r"no success\.json",),
                       variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "leave"}),
    "disk-full": Fault("a host's disk is full", (r"error: node2, rank 1 failed first", r"No space left on device",
                                                 r"cure: make room: a disk of node2 is full"), 2,
                       arrange=_tiny_disk, repair=_no_tiny_disk, variables={"BRIGADE_CACHE": TINY}),
    "rank-killed": Fault("kill -9 of a rank", (r"error: node2, rank 1 failed first: killed by signal 9 \(SIGKILL\)",),
                         strike=_signal_rank),
    "host-killed": Fault("a host is switched off", (r"error: node2 failed first: the host was lost",), strike=_power_off_node2),
    "link-cut": Fault("a link is cut in mid-step", (r"error: node2 failed first: the host was lost",), strike=_cut_link),
    "agent-killed": Fault("kill -9 of the far end of launch", (r"error: node2 failed first: the host was lost",),
                          strike=_kill_agent),
    "deepspeed-killed": Fault("kill -9 of DeepSpeed's launch process (its CLI then returns 0)",
                              (r"error: node2 failed first: deepspeed ended with exit code 0 while rank 1 went on",),
                              strike=_kill_deepspeed, launcher="deepspeed"),
    "launch-killed": Fault("kill -9 of launch itself", (), -9, strike=_signal_launch(signal.SIGKILL), gone=True),
    "launching-host-killed": Fault("the launching host is switched off", (), -9, strike=_power_off_node1, gone=True),
    "ctrl-c": Fault("Ctrl-C", (r"stopped by SIGINT",), 130, strike=_signal_launch(signal.SIGINT)),
    "ctrl-c-twice": Fault("Ctrl-C, and again at once", (r"ended at once by the second SIGINT",), 130, strike=_ctrl_c_twice),
    "sigterm": Fault("SIGTERM to launch", (r"stopped by SIGTERM",), 143, strike=_signal_launch(signal.SIGTERM)),
}  # fmt: skip
