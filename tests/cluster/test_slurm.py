"""A real Slurm on two hosts: the script that the project writes for it trains, and goes on after a pre-emption."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from brigade.hosts.job import make
from brigade.launch.write import text
from brigade.train.run import events
from testbed.cluster import Cluster
from testbed.slurm import Slurm
from testbed.strikes import training_process
from testing.clusters import SHORT, train_alone
from testing.patience import PATIENCE, wait_until
from testing.run_files import losses_of

pytestmark = pytest.mark.xdist_group("slurm")  # one daemon's tests, on one worker of pytest
RECIPE = "recipes/tiny/full.yaml"
ALLOCATED = "salloc --quiet --nodes=2 --ntasks-per-node=1"
# sbatch hands the environment of its shell on to the job.
UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
SETTINGS = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def slurm():
    with Cluster(2) as cluster, Slurm(cluster, slots=1) as slurm:
        yield slurm


def submit(slurm: Slurm, name: str, flags: list[str], restarts: tuple[str, ...] = ()) -> tuple[str, Path, Path]:
    """Write the script for one rank on each host and hand it in; the job's number, its output directory and its log."""
    shared = slurm.cluster.shared
    script, output, log = shared / f"{name}.sbatch", shared / name, shared / f"{name}.out"
    made = make(RECIPE, [*flags, "--output_dir", str(output)], None, {"node1": 1, "node2": 1})
    script.write_text(text("sbatch", made, restarts=restarts))
    said = slurm.cluster["node1"].run(f"sbatch --parsable --output={log} {script}", **SETTINGS)
    return said.stdout.strip(), output, log


def wait(slurm: Slurm, job: str, log: Path) -> dict[str, str]:
    """What Slurm says of a job when it is over."""
    wait_until(lambda: slurm.job(job)["JobState"] not in UNDER_WAY, said=lambda: f"{slurm.job(job)}\n{log.read_text()}")
    return slurm.job(job)


def wait_until_it_says(words: str, slurm: Slurm, job: str, log: Path) -> None:
    """Fails where the job ends before."""

    def has_said() -> bool:
        assert slurm.job(job)["JobState"] in ("PENDING", "RUNNING"), log.read_text()
        return log.exists() and words in log.read_text()

    wait_until(has_said)


def test_srun_starts_a_step_on_any_host_of_an_allocation(slurm):
    step = "srun --nodelist=node2 --nodes=1 --ntasks=1 --overlap"
    said = slurm.cluster["node1"].run(
        ["salloc", "--nodes=2", "bash", "-c", f"echo hello | {step} sh -c 'hostname; cat'"]
    )
    assert said.stdout.split() == ["node2", "hello"]


def test_check_inside_an_allocation_needs_no_hostfile_and_no_ssh(slurm):
    words = f"{ALLOCATED} python -m brigade check --quick --json -"
    done = slurm.cluster["node1"].run(words, timeout=PATIENCE, check=False)
    found = json.loads(done.stdout)
    assert found["hosts"] == {"node1": 1, "node2": 1}
    assert found["checks"][0]["name"] == "login"
    assert {result["level"] for result in found["checks"][0]["results"]} == {"green"}, done.stdout
    assert done.returncode in (0, 1), done.stdout


def test_launch_inside_an_allocation_needs_no_hostfile(slurm, single):
    folder = slurm.cluster.shared / "allocated"
    where = f"--log_dir {folder / 'logs'} --output_dir {folder / 'run'}"
    words = f"{ALLOCATED} python -m brigade launch {RECIPE} {where} {' '.join(SHORT)}"
    done = slurm.cluster["node1"].run(words, timeout=PATIENCE, check=False, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "node2  starting 1 rank by slurm" in done.stderr and "world size 2 on 2 hosts, by torchrun" in done.stdout
    assert losses_of(folder / "run") == pytest.approx(single, rel=1e-5)
    assert not any(host.find("train.py") for host in slurm.cluster)


def test_written_script_trains_on_all_hosts_and_goes_on_after_more_urgent_work_took_them(slurm, tmp_path):
    """And loses no step, though it would never come to a checkpoint of its own."""
    flags = [*SHORT, "--max_steps", "12", "--save_steps", "5000"]
    slow = slurm.cluster["node2"]
    slow.throttle("100mbit")  # so that it is still training when the other job comes, on any machine
    job, output, log = submit(slurm, "pre-empted", flags)
    wait_until_it_says("\nstep 2/", slurm, job, log)
    slurm.cluster["node1"].run("sbatch --partition=urgent --nodes=2 --exclusive --output=/dev/null --wrap 'sleep 1'")
    while slurm.job(job)["JobState"] == "RUNNING":
        time.sleep(0.05)
    slow.throttle(None)
    fields = wait(slurm, job, log)
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("COMPLETED", "0:0", "1"), log.read_text()[
        -3000:
    ]
    assert "world size 2 on 2 hosts" in log.read_text()
    stopped = next(event for event in events.read(output) if event["event"] == "stopped")
    assert stopped["checkpoint"] == f"checkpoint-{stopped['step']}" and stopped["by"].startswith("SIGTERM to rank ")
    assert re.search(rf"continues\s+from\s.*{stopped['checkpoint']}\b", log.read_text())
    assert [event["step"] for event in events.read(output) if event["event"] == "step"] == list(range(1, 13))
    assert losses_of(output) == pytest.approx(train_alone(flags, tmp_path / "run"), rel=1e-5)


def test_script_with_restarts_starts_again_inside_its_allocation(slurm):
    flags = [*SHORT, "--max_steps", "8", "--save_steps", "2"]
    job, output, log = submit(slurm, "restarted", flags, ("--restarts", "2"))
    wait_until_it_says("step 5/", slurm, job, log)
    os.kill(training_process(slurm.cluster, "node2"), signal.SIGKILL)
    fields = wait(slurm, job, log)
    said = log.read_text()
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "0"), said[-3000:]
    assert "attempt 2 on node1, node2" in said and re.search(r"continues\s+from\s.*checkpoint-", said), said[-3000:]
    assert len(losses_of(output)) == 8


def test_nothing_of_slurm_stays_on_the_hosts():
    with Cluster(1) as cluster:
        with Slurm(cluster):
            cluster["node1"].run("sbatch --output=/dev/null --wrap 'sleep 1000'")
            assert cluster["node1"].run("ls /etc/slurm").stdout.split() == ["cgroup.conf", "gres.conf", "slurm.conf"]
        assert not cluster["node1"].processes()
        assert "slurm.conf" not in cluster["node1"].run("ls /etc/slurm").stdout.split()
