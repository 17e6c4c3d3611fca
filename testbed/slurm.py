"""Slurm on a cluster of the testbed: munged and slurmd on every host, slurmctld on the first."""

import os
import subprocess
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from .cluster import Cluster
from .needs import SLURM, missing

CONF = """\
ClusterName=testbed
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
# A job that is queued again starts when its old credential has expired: after two minutes by default.
AuthInfo=cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
# Nothing here needs a control group.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
# A job that is cancelled has this many seconds to end.
KillWait=5
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# The hosts have as many cores as they are said to have, whatever the machine has.
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1
# Jobs of the partition `urgent` take the hosts of others, which get the signal they asked for, a minute, and are queued again.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=all Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""
# Still slurmd wants a cgroup plugin, and left to choose one it ends where the machine's mounts do not please it. Named, the
# first version's starts anywhere: with mounts of version 1, of version 2 and with none (seen with Slurm 22.05).
CGROUP = "CgroupPlugin=cgroup/v1\n"
# Pretended GPUs: device files of a host's own /run that hold nothing. Jobs ask for GPUs as on a real cluster.
GRES = "AutoDetect=off\nName=gpu File=/run/gpu[0-{last}]\n"


class Slurm:
    """Slurm on all hosts of `cluster`, each with `slots` cores and as many (pretended) GPUs; a context manager.

    Jobs are submitted from any host: cluster["node1"].run("sbatch job.sh"). Everything ends with the cluster.

    Raises RuntimeError when Slurm is not installed, or does not come up.
    """

    def __init__(self, cluster: Cluster, slots: int = 8) -> None:
        lacks = missing(SLURM)
        if lacks:
            raise RuntimeError("no Slurm can be started here:\n" + "\n".join(f"  {line}" for line in lacks))
        self.cluster, self.slots = cluster, slots
        self.first = next(iter(cluster))
        self.directory = cluster.directory / "slurm"
        self.daemons: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> "Slurm":
        try:
            self._configure()
            self._start()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def down(self) -> None:
        """Cancel the jobs, end the daemons, and give the hosts their own /etc/slurm back."""
        if self.daemons:
            with suppress(TimeoutError):
                line = "scancel --user=root; while squeue --noheader | grep -q .; do sleep 0.1; done"
                self.first.run(line, timeout=15, check=False)
        for host in self.cluster:
            for name in ("slurmctld", "slurmd", "slurmstepd", "munged"):
                host.kill(name)
        for daemon in self.daemons:
            daemon.wait()
        self.daemons = []
        for host in self.cluster:
            host.run("umount /etc/slurm", check=False)

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Restarts, ExitCode, ..."""
        said = self.first.run(["scontrol", "show", "job", "--oneliner", number]).stdout
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def _configure(self) -> None:
        etc = self.directory / "etc"
        for path in (etc, self.directory / "state", *(self.directory / f"spool-{host.name}" for host in self.cluster)):
            path.mkdir(parents=True, exist_ok=True)
        nodes = (
            f"NodeName={host.name} NodeAddr={host.address} CPUs={self.slots} Gres=gpu:{self.slots} State=UNKNOWN"
            for host in self.cluster
        )
        values = {"first": self.first.name, "directory": self.directory, "nodes": "\n".join(nodes)}
        (etc / "slurm.conf").write_text(CONF.format(**values))
        (etc / "cgroup.conf").write_text(CGROUP)
        (etc / "gres.conf").write_text(GRES.format(last=self.slots - 1))
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def _start(self) -> None:
        for host in self.cluster:
            host.bind(self.directory / "etc", "/etc/slurm")
            host.run(
                f"mkdir -p -m 755 /run/munge; for gpu in /run/gpu{{0..{self.slots - 1}}}; do mknod $gpu c 1 3; done"
            )
            files = f"--key-file={self.directory / 'munge.key'} --seed-file=/run/munge/seed --pid-file=/run/munge/pid"
            self._daemon(host, "munged", "--foreground", *files.split(), "--num-threads=2")
            if host is self.first:
                self._daemon(host, "slurmctld", "-D")
            self._daemon(host, "slurmd", "-D", "-N", host.name)
        self.wait_until_idle()

    def _daemon(self, host: Any, *words: str) -> None:
        with (self.directory / f"{words[0]}-{host.name}.log").open("ab") as log:
            self.daemons.append(host.popen([f"/usr/sbin/{words[0]}", *words[1:]], cwd="/", stdout=log, stderr=log))

    def wait_until_idle(self, timeout: float = 30) -> None:
        """Until every host is free for a job."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            states = self.first.run("sinfo --noheader --Node --partition=all --format=%T", check=False).stdout.split()
            if len(states) == len(self.cluster.hosts) and set(states) == {"idle"}:
                return
            if any(daemon.poll() is not None for daemon in self.daemons):
                break
            time.sleep(0.1)
        logs = "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.directory.glob("*.log")))
        raise RuntimeError(f"Slurm does not come up; sinfo says {states}\n{logs}")
