"""What goes wrong on clusters, as a table: how each fault is brought about, and what `launch` must say of it.

tests/cluster/test_faults.py tries each once, benchmarks/faults.py measures the time to the verdict.
"""

import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import storage, strikes
from .cluster import PROJECT, Cluster
from .strikes import Attempt

INJECTED = PROJECT / "tests" / "ranks" / "bad_input"  # its sitecustomize.py lets ranks fail
RUNNING = "step 2/"
LATER = 5  # seconds that a rank may come to the rendezvous after the first; how long the first takes is the machine's affair
SILENCE = "--hang_timeout 8"  # seconds; no step of the tiny model takes that long, on however busy a machine
SINCE_CHECKPOINT = "the steps since the last checkpoint"
TRAIN = (
    "--logging_steps 1 --max_train_samples 100 --max_eval_samples 2 --eval_steps 5000 --eval_answers 0"
    " --max_steps {} --save_steps {}"
)


@dataclass(frozen=True)
class Fault:
    """what: for people; says: patterns that the verdict must show; code: exit code of launch
    arrange: before the launch; strike: once the launch has said `when`; after: what must hold at the end, raises
    AssertionError; repair: afterwards
    lost: default: nothing where it strikes before the first step, else the steps since the last checkpoint
    words: of launch, where {shared} is the cluster's directory; at: the host where launch runs
    hosts, slots: in the hostfile (slots of each, or by host), names: if not the first `hosts` of the cluster
    steps, save_steps: of the run; output: its directory, on each host its own
    gone: the launch cannot speak any more
    """

    what: str
    says: tuple[str, ...]
    code: int = 1
    arrange: Callable[[Cluster], None] | None = None
    strike: Callable[[Attempt], None] | None = None
    after: Callable[[Attempt], None] | None = None
    repair: Callable[[Cluster], None] | None = None
    output: str = ""
    when: str = RUNNING
    lost: str = ""
    steps: int = 5000
    save_steps: int = 5000
    hosts: int = 2
    names: tuple[str, ...] = ()
    at: str = "node1"
    launcher: str = "torchrun"
    words: str = ""
    slots: int | dict[str, int] = 1
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
        names = fault.names or tuple(host.name for host in cluster.hosts[: fault.hosts])
        slots = dict.fromkeys(names, fault.slots) if isinstance(fault.slots, int) else fault.slots
        hostfile = fault.hostfile or str(cluster.hostfile(slots))
        launch = (
            f"-m brigade launch recipes/tiny/full.yaml --hostfile {hostfile} --launcher {fault.launcher} --silence 15"
            " --no_check"  # what the checks find before a launch is in preflight.py
            " --report_page false"  # a second of each
        )
        where = f"--log_dir {folder / 'logs'} --output_dir {fault.output or folder / 'run'}"
        train = TRAIN.format(fault.steps, fault.save_steps)
        command = [sys.executable, *f"{launch} {fault.words.format(shared=cluster.shared)} {train} {where}".split()]
        before = {pid for host in cluster for pid in host.processes()}
        begun = time.monotonic()
        with (folder / "said").open("wb") as out:
            process = cluster[fault.at].popen(
                command, stdout=out, stderr=out, **{"OMP_NUM_THREADS": "1"} | fault.variables
            )
        attempt = Attempt(cluster, process, folder)
        if fault.strike:
            while fault.when not in attempt.said:
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
        if fault.after:
            fault.after(attempt)
        return attempt
    finally:
        if fault.repair:
            fault.repair(cluster)
        cluster.heal()


def lost(fault: Fault) -> str:
    """What the run does not get back, for people."""
    early = not fault.strike and fault.variables.get("BRIGADE_TEST_FAULT") != "step"
    return fault.lost or ("nothing, it had not begun" if early else SINCE_CHECKPOINT)


def misses(fault: Fault, attempt: Attempt) -> list[str]:
    """What the launch should have said, and did not."""
    return [pattern for pattern in fault.says if not re.search(pattern, attempt.said)]


# A run that loses at most its last step but one, and goes on; it has steps left when a busy machine sees the fifth late.
_EVERY_SECOND: dict[str, Any] = {"steps": 24, "save_steps": 2, "when": "step 5/", "after": strikes.went_on}
_SOON = " --restart_pause 1 --silence 10"
_WENT_ON = (r"continues +from .*checkpoint-\d+", r"time line of 2 attempts:\n", r"succeeded\n  lost: ")
_FAILING_RANK: dict[str, Any] = {"PYTHONPATH": str(INJECTED)}
_STOPS: dict[str, Any] = {"after": strikes.saved_a_checkpoint, "lost": "nothing"}
FAULTS: dict[str, Fault] = {
    "missing-hostfile": Fault("the hostfile does not exist", (r"error: flag --hostfile", r"nowhere"), 2, hostfile="nowhere"),
    "unreachable": Fault("a host cannot be reached", (r"error: node2", r"timed out|No route"), 2, strikes.cut_node2),
    "wrong-key": Fault("a host refuses the ssh key", (r"error: node2", r"Permission denied", r"ssh-copy-id node2"), 2,
                       strikes.other_key, repair=strikes.right_key),
    "slots": Fault("more slots than devices", (r"2 hosts do not fit|error: node1", r"slots=2 in the hostfile, but it has 1 GPU"),
                   2, strikes.one_gpu_each, repair=strikes.no_gpu, slots=2),
    "port-in-use": Fault("the given port is in use", (r"error: port 29511 on node1", r"in use by process \d+ \(python3"), 2,
                         strikes.occupy_port(29511), repair=strikes.free_port, words="--master_port 29511"),
    "port-blocked": Fault("a firewall drops the port", (r"error: node2", r"cannot reach node1 on port 29500", r"10\.77\.0\.1"), 2,
                          strikes.block_port),
    "firewall": Fault("a firewall opens port 29500 alone", (
        r"error: 2 ranks on node1, node2 met at the rendezvous, and did not reach each other within 5 s",
        r"cure: .*open all TCP ports between the hosts"),
                      arrange=strikes.firewall, words=f"--start_timeout {LATER}"),
    "other-clone": Fault("a host has another clone", (r"error: node2", r"another clone than on node1"), 2, strikes.other_clone,
                         repair=strikes.same_clone),
    "raises": Fault("a rank raises", (r"error: node2, rank 1 failed first", r"ValueError: the third step fails on this rank"),
                    variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "step", "BRIGADE_TEST_FAILED_AT": "/dev/null"}),
    "hangs-at-start": Fault("a rank hangs at start", (r"error: node2, rank 1 failed first", r"did not get to the rendezvous"),
                            words=f"--start_timeout {LATER}", variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "hang"}),
    "raises-among-others": Fault("one of several ranks of a host raises", (
        r"error: node1, rank 1 failed first\n", r"ValueError: the third step fails on this rank"), slots=2,
        variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "step", "BRIGADE_TEST_FAILED_AT": "/dev/null"}),
    "nan": Fault("NaN in one rank's batch", (
        r"error: node\d, rank \d failed first", r"step 3\n.*the loss is nan in micro-batch 1 of rank 1 on node2, and no weight",
        r"train\S* row \d+", r"cure: look at these samples, or continue with --nonfinite skip"), 2,
        lost="the steps since the last checkpoint", variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "nan"}),
    "no-marker": Fault("all ranks end with exit code 0, but train.py did not reach its end", (
        r"error: node\d, rank \d failed first: exit code 0, before its first step, where train\.py had not reached its end",),
                       variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "leave"}),
    "disk-full": Fault("a host's disk is full", (r"error: node2, rank 1 failed first", r"No space left on device",
                                                 r"cure: make room: a disk of node2 is full"), 2,
                       arrange=storage.tiny_disk, repair=storage.no_tiny_disk, variables={"BRIGADE_CACHE": storage.TINY}),
    "disk-full-saving": Fault("a host's disk is full while a checkpoint is saved", (
        r"error: node2, rank 1 failed first", r"checkpoint-4 could not be written by rank 1 on node2: .*No space left",
        r"cure: make room: a disk of node2 is full"), 2,
        lost=SINCE_CHECKPOINT,
        arrange=storage.small_disks, after=storage.whole_on_small_disks("checkpoint-2"), repair=storage.no_small_disks,
        save_steps=2, output=f"{storage.SMALL}/run"),
    "unmounted": Fault("a host loses the shared output directory", (
        r"error: node2, rank 1 failed first", r"on node2 this is no longer the directory|rank 1 on node2 wrote, is missing"), 2,
        storage.mount_outputs, storage.unmount_on_node2, storage.nothing_on_node2_and_all_whole, storage.unmount_outputs,
        output=f"{storage.MOUNTED}/run", when="step 5/", save_steps=2, words="--save_total_limit 2"),
    "read-only": Fault("the output directory is read-only", (
        r"rank 0 of 2: /run/small/run", r"the output directory cannot be written: Read-only file system"), 2,
        arrange=storage.read_only_disks, repair=storage.no_small_disks, output=f"{storage.SMALL}/run"),
    "killed-saving": Fault("kill -9 of a rank while a checkpoint is saved", (
        r"error: node2, rank 1 failed first: killed by signal 9 \(SIGKILL\)",), strike=storage.kill_while_saving,
        after=storage.only_whole_checkpoints, when="step 4/", save_steps=2, words="--report_page true"),
    "rank-killed": Fault("kill -9 of a rank", (r"error: node2, rank 1 failed first: killed by signal 9 \(SIGKILL\)",),
                         strike=strikes.signal_rank),
    **{f"killed-in-{where}": Fault(f"kill -9 of a rank in its {what}", (
        r"error: node2, rank 1 failed first: killed by signal 9 \(SIGKILL\)",), lost=SINCE_CHECKPOINT,
        variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": f"killed-in-{where}"})
       for where, what in (("forward", "forward pass"), ("optimizer", "optimizer's step"))},
    "killed-in-loading": Fault(
        "kill -9 of a rank while it loads the checkpoint from which a restart goes on",
        (r"(?s)killed by signal 9.*killed by signal 9", r"time line of 3 attempts:\n", *_WENT_ON[::2]), 0,
        storage.forget_the_fault, strikes.signal_rank, repair=storage.forget_the_fault, words="--restarts 2" + _SOON,
        variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "killed-in-loading", "BRIGADE_TEST_FAILED_AT": storage.FAILED_ONCE},
        **_EVERY_SECOND),
    **{f"checkpoint-{name}": Fault(f"the newest checkpoint {what}, with --restarts", (
        r"left out +checkpoint-\d+: " + says, *_WENT_ON, r"attempt 2 went on from step \d+: \d+ steps lost"), 0,
        strike=storage.then_damage(damage),
        words="--restarts 1" + _SOON, **_EVERY_SECOND | {"when": "step 7/"})
       for name, what, says, damage in (
           ("truncated", "has a truncated part", r"\S+ has [\d,]+ bytes of", storage.truncate),
           ("flipped", "has a flipped bit", r"\S+ is not what was written", storage.flip_a_bit),
           ("missing", "lacks a part", r"\S+ is missing", Path.unlink),
           ("of-other-code", "is of a later version of Brigade", r"it cannot be read: brigade\.json has format 99",
            storage.of_later_code))},
    "data-changed": Fault("a data file changes before a restart goes on", (
        r"the data or the tokenizer changed since this run began", r"no restart: a mistake that somebody has to correct"), 2,
        storage.own_data, storage.change_data, lost=SINCE_CHECKPOINT + ", once the old data is back",
        words="--restarts 1" + _SOON + " --dataset_name null --train_file {shared}/train.jsonl"
        " --validation_file {shared}/heldout.jsonl", **_EVERY_SECOND | {"after": None}),
    "leaves-with-0": Fault("a rank ends with exit code 0 in mid-run", (
        r"error: node2, rank 1 failed first: exit code 0, at step 3, in the forward pass, .* sys\.exit\(0\) or os\._exit\(0\)",),
        lost=SINCE_CHECKPOINT, variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "leaves"}),
    "hangs-at-exit": Fault("a rank does not end after the run's success", (
        r"the run has succeeded; rank 1 on node2 did not end within 8 s: ended now", r"succeeded: "), 0, lost="nothing",
        steps=4, words=SILENCE, variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "hangs-at-exit"}),
    "slow-rank": Fault("a rank is slow", (r"rank 1 on node2 is slow, score 0\.\d+.*forward pass", r"succeeded"), 0,
                       lost="nothing", variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "slow-forward"}, steps=30),
    "rank-stopped": Fault("a rank is stopped (SIGSTOP)", (
        r"error: rank 1 on node2 has been stopped \(SIGSTOP, or a debugger\) since step \d+",), strike=strikes.stop_rank),
    "data-sleeps": Fault("a rank sleeps in its data loader", (
        r"error: rank 1 on node2 has waited in data loading since step 3; rank 0 waits for it in", r"line \d+ in sleep"),
        lost=SINCE_CHECKPOINT, words=SILENCE, variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "sleeping-data"}),
    "host-killed": Fault("a host is switched off", (r"error: node2 failed first: the host was lost",),
                         strike=strikes.power_off("node2")),
    "link-cut": Fault("a link is cut in mid-step", (r"error: node2 failed first: the host was lost",), strike=strikes.cut_link),
    "agent-killed": Fault("kill -9 of the far end of launch", (r"error: node2 failed first: the host was lost",),
                          strike=strikes.kill_agent),
    "deepspeed-killed": Fault("kill -9 of DeepSpeed's launch process (its CLI then returns 0)",
                              (r"error: node2 failed first: deepspeed ended with exit code 0 while rank 1 went on",),
                              strike=strikes.kill_deepspeed, launcher="deepspeed"),
    "launch-killed": Fault("kill -9 of launch itself", (), -9, strike=strikes.signal_launch(signal.SIGKILL), gone=True),
    "launching-host-killed": Fault("the launching host is switched off", (), -9, strike=strikes.power_off("node1"), gone=True),
    "ctrl-c": Fault("Ctrl-C", (r"Stopped by Ctrl-C at step", r"stopped by SIGINT at step"), 130,
                     strike=strikes.signal_launch(signal.SIGINT), **_STOPS),
    "ctrl-c-twice": Fault("Ctrl-C, and again at once", (r"ended at once by the second SIGINT",), 130,
                          strike=strikes.ctrl_c_twice),
    "host-killed-spare": Fault(
        "a host is switched off, with --restarts and a --spare",
        (r"node2 failed first: the host was lost", r"attempt 2 on node1, node3", *_WENT_ON), 0, strike=strikes.power_off("node2"),
        words="--restarts 1 --spare node3" + _SOON, hosts=3, names=("node1", "node2"), **_EVERY_SECOND),
    "astray": Fault(
        "a rank's weights go astray, with --restarts and a --spare; then the spare is switched off",
        (r"rank 2 on node2 holds something else than most of 3 ranks: first \S+",
         r"nothing of this step is saved, and checkpoint-2 is the newest sound one",
         r"attempt 2 on node1, node3", r"continues +from .*checkpoint-2\b", r"node3 failed first: the host was lost",
         r"attempt 3 on node1, node2", r"time line of 3 attempts:\n", _WENT_ON[2]), 0,
        storage.only_node2_fails, strikes.power_off("node3"), repair=storage.forget_the_fault, slots={"node1": 2, "node2": 1},
        words="--restarts 2 --spare node3 --global_batch_size 6 --per_device_train_batch_size 2" + _SOON,
        variables=_FAILING_RANK | {"BRIGADE_TEST_FAULT": "astray", "BRIGADE_TEST_FAILED_AT": storage.FAILED_ONCE},
        hosts=3, **_EVERY_SECOND),
    "first-host-killed": Fault(
        "the first host is switched off, with --restarts and --min_hosts; launch runs on another",
        (r"node1 failed first: the host was lost", r"attempt 2 on node2\n", *_WENT_ON), 0, strike=strikes.power_off("node1"),
        words="--restarts 1 --min_hosts 1" + _SOON, hosts=3, names=("node1", "node2"), at="node3", **_EVERY_SECOND),
    "link-cut-for-good": Fault(
        "a link is cut for good, with --restarts and --min_hosts",
        (r"node2 failed first: the host was lost", r"attempt 2 on node1\n", *_WENT_ON), 0, strike=strikes.cut_link,
        words="--restarts 1 --min_hosts 1" + _SOON, **_EVERY_SECOND),
    "rebooted-unmounted": Fault(
        "after a reboot the output directory is not mounted on a host, with --restarts and --min_hosts",
        (r"error: node2, rank 1 failed first\n", r"none on node2, but checkpoint-\d+ on node1", r"attempt 3 on node1\n",
         _WENT_ON[0], _WENT_ON[2]), 0, strike=storage.come_back_without_output, repair=storage.mount_output_again,
        words="--restarts 2 --min_hosts 1" + _SOON, **_EVERY_SECOND),
    "port-blocked-on-one": Fault(
        "a firewall drops the port between two hosts, with --restarts and --min_hosts",
        (r"error: node2\n", r"cannot reach node1 on port 29500", r"attempt 2 on node1\n", _WENT_ON[2]), 0, strikes.block_port,
        lost="nothing, it had not begun", words="--restarts 1 --min_hosts 1" + _SOON, steps=4),
    "link-cut-20s": Fault("a link is cut for 20 s", (r"succeeded: ",), 0, strike=strikes.cut_link_for(20),
                          words="--restarts 1 --silence 45", lost="nothing", **_EVERY_SECOND),
    "launch-suspended": Fault("launch itself is suspended for 20 s", (r"succeeded: ",), 0, strike=strikes.suspend_launch(20),
                              words="--restarts 1 --silence 45", lost="nothing", **_EVERY_SECOND),
    "clocks": Fault("kill -9 of a rank, with --restarts, where clocks differ by an hour",
                    (r"node2, rank 1 failed first: killed", r"attempt 2 on node1, node2", *_WENT_ON), 0,
                    strikes.other_clock, strikes.signal_rank, repair=strikes.right_clock,
                    words="--restarts 1" + _SOON, **_EVERY_SECOND),
    "sigterm": Fault("SIGTERM to launch", (r"stopped by SIGTERM at step",), 143,
                     strike=strikes.signal_launch(signal.SIGTERM), **_STOPS),
    "sigterm-rank": Fault("SIGTERM to one rank", (r"Stopped by SIGTERM to rank 1 at step", r"stopped at step"), 75,
                          strike=strikes.sigterm_rank, **_STOPS),
    "sigterm-rank-twice": Fault("SIGTERM to one rank, and again while it cannot finish its step", (
        r"stopped when rank 1 on node2 was ended by SIGTERM",), 75, strike=strikes.sigterm_rank_twice),
    "sigterm-launcher": Fault("SIGTERM to a host's launcher", (
        r"Stopped by SIGTERM to rank 1 at step", r"stopped at step"), 75, strike=strikes.sigterm_launcher, **_STOPS),
    "sigterm-all": Fault("SIGTERM to the launchers and ranks of all hosts", (r"Stopped by SIGTERM", r"stopped at step"), 75,
                         strike=strikes.sigterm_all, **_STOPS),
    "sigterm-storm": Fault("SIGTERM to all ranks, ten times a second", (r"Stopped by SIGTERM", r"stopped at step"), 75,
                           strike=strikes.sigterm_storm, **_STOPS),
    "sigterm-storm-on-all": Fault("SIGTERM to the launchers and ranks of all hosts, ten times a second", (
        r"(error: node\d failed first: torchrun was ended by SIGTERM|stopped at step|ended by SIGTERM)",), 1,
        strike=strikes.sigterm_storm_on_all),
    "stop-file": Fault("a file `stop` in the output directory", (r"Stopped by the file stop", r"stopped at step"), 75,
                       strike=strikes.stop_file, **_STOPS),
    "two-at-once": Fault("a second launch on the same hosts, while the first one's launchers start", (r"succeeded: ",), 0,
                         strike=strikes.launch_beside, when="starting 1 rank", steps=4, after=strikes.trained_beside,
                         lost="nothing"),
    "two-runs": Fault("a second launch on the same output directory, from another host", (r"stopped by SIGINT at step",), 130,
                      strike=strikes.launch_again, after=strikes.refused_the_second, lost="nothing: the first run goes on"),
}  # fmt: skip
