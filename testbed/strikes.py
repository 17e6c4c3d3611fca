"""How faults are brought about on the hosts of a cluster, and repaired: what the table of faults.py names."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from brigade.train.distributed import stop

from .cluster import PROJECT, Cluster

OPENING = "tcp flags & (syn | ack) == syn"  # the first packet of a connection, and no answer
OCCUPIES = "occupies a port"  # in the command line of who does


@dataclass
class Attempt:
    """One launch into one fault.

    folder: has the launch's output in `said`, its logs in `logs`, the run in `run`
    seconds: from the fault to the end of the launch and of the last process on any host
    """

    cluster: Cluster
    process: subprocess.Popen[bytes]
    folder: Path
    code: int = 0
    seconds: float = 0.0

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text(errors="replace")

    def wait_for(self, words: str) -> None:
        """Raises TimeoutError where the launch ends without them."""
        while words not in self.said:
            if self.process.poll() is not None:
                raise TimeoutError(f"launch never said {words!r}:\n{self.said[-3000:]}")
            time.sleep(0.05)

    @property
    def losses(self) -> dict[int, list[float]]:
        """Step -> its loss as it was printed, once for each time that it was trained."""
        found: dict[int, list[float]] = {}
        for step, loss in re.findall(r"^step (\d+)/\d+  loss ([\d.]+)", self.said, re.MULTILINE):
            found.setdefault(int(step), []).append(float(loss))
        return found


def cut_node2(cluster: Cluster) -> None:
    cluster["node2"].cut()


def other_key(cluster: Cluster) -> None:
    keys = cluster["node2"].directory / "ssh" / "authorized_keys"
    shutil.copy(cluster["node1"].directory / "ssh" / "host_key.pub", keys)


def right_key(cluster: Cluster) -> None:
    shutil.copy(cluster.home / ".ssh" / "id_ed25519.pub", cluster["node2"].directory / "ssh" / "authorized_keys")


def one_gpu_each(cluster: Cluster) -> None:
    """A driver's tool that lists one GPU, on both hosts."""
    tools = cluster.shared / "driver"
    tools.mkdir(exist_ok=True)
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-0)'\n")
    (tools / "nvidia-smi").chmod(0o755)
    for host in cluster:
        host.path = f"{tools}:{host.path}"
        host.environment(**host.variables)


def no_gpu(cluster: Cluster) -> None:
    for host in cluster:
        host.path = host.path.removeprefix(f"{cluster.shared / 'driver'}:")
        host.environment(**host.variables)


def occupy_port(port: int) -> Callable[[Cluster], None]:
    def arrange(cluster: Cluster) -> None:
        program = f"import signal,socket; s=socket.create_server(('',{port})); signal.pause()  # {OCCUPIES}"
        cluster["node1"].popen(["python3", "-c", program])
        while cluster["node1"].run(f": < /dev/tcp/127.0.0.1/{port}", check=False).returncode:
            time.sleep(0.02)

    return arrange


def free_port(cluster: Cluster) -> None:
    cluster["node1"].kill(OCCUPIES)


def block_port(cluster: Cluster) -> None:
    cluster["node1"].block(29500, "in")


def firewall(cluster: Cluster) -> None:
    """No host lets anybody in on the ports that gloo chooses from; what answers its own questions comes in."""
    for host in cluster:
        host.drop("input", f"tcp dport 30000-65535 {OPENING}")


def other_clone(cluster: Cluster) -> None:
    edited = cluster.shared / "edited_train.py"
    edited.write_text((PROJECT / "train.py").read_text() + "\n# edited here alone\n")
    cluster["node2"].bind(edited, PROJECT / "train.py")


def same_clone(cluster: Cluster) -> None:
    cluster["node2"].unbind(PROJECT / "train.py")


def training_process(cluster: Cluster, host: str) -> int:
    """The process in which train.py trains on a host with one rank: the youngest of launcher, watcher and trainer."""
    return cluster[host].find("train.py")[-1]


def signal_rank(attempt: Attempt) -> None:
    os.kill(training_process(attempt.cluster, "node2"), signal.SIGKILL)


def stop_rank(attempt: Attempt) -> None:
    os.kill(training_process(attempt.cluster, "node2"), signal.SIGSTOP)


def power_off(host: str) -> Callable[[Attempt], None]:
    return lambda attempt: attempt.cluster[host].power_off()


def cut_link(attempt: Attempt) -> None:
    attempt.cluster["node2"].cut()


def cut_link_for(seconds: float) -> Callable[[Attempt], None]:
    def strike(attempt: Attempt) -> None:
        attempt.cluster["node2"].cut()
        time.sleep(seconds)
        attempt.cluster["node2"].restore()

    return strike


def suspend_launch(seconds: float) -> Callable[[Attempt], None]:
    def strike(attempt: Attempt) -> None:
        signal_launch(signal.SIGSTOP)(attempt)
        time.sleep(seconds)
        attempt.process.send_signal(signal.SIGCONT)  # nsenter stops with its child, and wakes it when it wakes itself

    return strike


def other_clock(cluster: Cluster) -> None:
    cluster["node2"].clock("+1h")


def right_clock(cluster: Cluster) -> None:
    cluster["node2"].clock(None)


def went_on(attempt: Attempt) -> None:
    """After a restart, or in spite of the fault: every step is on record once, and what was trained twice gave the same loss."""
    state = json.loads((attempt.folder / "run" / "trainer_state.json").read_text())
    steps = [entry["step"] for entry in state["log_history"] if "loss" in entry]
    assert steps == list(range(1, state["max_steps"] + 1)), steps
    for step, losses in attempt.losses.items():
        assert max(losses) - min(losses) <= 2e-4, f"step {step}: {losses}"


def kill_agent(attempt: Attempt) -> None:
    attempt.cluster["node2"].kill("brigade.hosts.agent")


def kill_deepspeed(attempt: Attempt) -> None:
    attempt.cluster["node2"].kill("deepspeed.launcher.launch")


def signal_launch(number: int) -> Callable[[Attempt], None]:
    def strike(attempt: Attempt) -> None:
        with suppress(ProcessLookupError):
            attempt.cluster["node1"].send(attempt.process, number)

    return strike


def ctrl_c_twice(attempt: Attempt) -> None:
    for _ in range(2):
        attempt.cluster["node1"].send(attempt.process, signal.SIGINT)
        time.sleep(0.1)


def sigterm_rank(attempt: Attempt) -> None:
    os.kill(training_process(attempt.cluster, "node2"), signal.SIGTERM)


def sigterm_rank_twice(attempt: Attempt) -> None:
    """The other rank is held fast, so that the ranks cannot agree; and the second signal is none that a launcher hands on."""
    held = training_process(attempt.cluster, "node1")
    os.kill(held, signal.SIGSTOP)
    try:
        for _ in range(2):
            sigterm_rank(attempt)
            time.sleep(stop.AGAIN + 0.5)
    finally:
        with suppress(ProcessLookupError):
            os.kill(held, signal.SIGCONT)


def sigterm_launcher(attempt: Attempt) -> None:
    os.kill(attempt.cluster["node2"].find("torchrun")[0], signal.SIGTERM)


def sigterm_all(attempt: Attempt) -> None:
    """As Slurm does: every process of the job."""
    for host in attempt.cluster:
        for pid in host.find("train.py"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def sigterm_storm(attempt: Attempt) -> None:
    """To the ranks of all hosts, not to their launchers: ten times a second, until none is left."""
    while attempt.process.poll() is None:
        for host in attempt.cluster:
            for pid in host.find("train.py")[-2:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)


def sigterm_storm_on_all(attempt: Attempt) -> None:
    """Likewise to launchers, which the second signal ends at once; then there is no store in which ranks could meet."""
    while attempt.process.poll() is None:
        sigterm_all(attempt)
        time.sleep(0.1)


def stop_file(attempt: Attempt) -> None:
    (attempt.folder / "run" / stop.FILE).touch()


def saved_a_checkpoint(attempt: Attempt) -> None:
    """The run has a checkpoint of the very step at which it stopped: nothing is lost."""
    run = attempt.folder / "run"
    marker = json.loads((run / "stopped.json").read_text())
    assert marker["checkpoint"] == f"checkpoint-{marker['step']}" and (run / marker["checkpoint"]).is_dir(), marker
    assert f"at step {marker['step']}" in attempt.said and not (run / stop.FILE).exists()


def _launch_too(attempt: Attempt, host: str, old: str, new: str) -> None:
    """The same command once more, from a host, with other words in it."""
    launch = attempt.cluster["node1"].find("-m brigade launch")[-1]
    words = Path(f"/proc/{launch}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    command = [word.replace(old, new) for word in words]
    done = attempt.cluster[host].run(command, check=False, timeout=300, OMP_NUM_THREADS="1")
    (attempt.folder / "second").write_text(f"{done.returncode}\n{done.stdout}{done.stderr}")


def launch_again(attempt: Attempt) -> None:
    _launch_too(attempt, "node2", f"{attempt.folder}/logs", f"{attempt.folder}/logs-2")
    signal_launch(signal.SIGINT)(attempt)


def launch_beside(attempt: Attempt) -> None:
    """A second run on the same hosts, while the first one's launchers start."""
    _launch_too(attempt, "node1", str(attempt.folder), f"{attempt.folder}-beside")


def trained_beside(attempt: Attempt) -> None:
    code, _, said = (attempt.folder / "second").read_text().partition("\n")
    ports = [re.search(r"to 10\.77\.0\.1:(\d+)", text)[1] for text in (attempt.said, said)]  # type: ignore[index]
    assert code == "0" and "succeeded: " in said and ports[0] != ports[1], said


def refused_the_second(attempt: Attempt) -> None:
    saved_a_checkpoint(attempt)
    code, _, said = (attempt.folder / "second").read_text().partition("\n")
    assert code == "2" and re.search(r"another run is using it: process \d+ on node1", said), said
