"""The sbatch script, run on two hosts that fakes of Slurm's commands pretend: what each host starts, and how it ends."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from brigade.hosts.job import make
from brigade.launch.write import text
from brigade.train.run import events, starts
from testing.pretended_slurm import NASTY, SCONTROL, Batch
from testing.programs import shellcheck

pytestmark = pytest.mark.usefixtures("in_the_repository")
TINY = "recipes/tiny/full.yaml"


@pytest.fixture
def batch(tmp_path):
    return Batch(tmp_path)


def script(*flags, recipe=TINY, hosts=2, slots=8, restarts=()):
    job = make(recipe, list(flags), "hostfiles/2x8", {f"node{n + 1}": slots for n in range(hosts)})
    return text("sbatch", job, restarts=restarts)


def noticed(batch, written, started=2):
    """The exit code and the output of a job that hangs until Slurm's notice, which comes when so many hosts have started."""
    process = batch.start(written, "hang")
    batch.wait_for(started)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def test_each_host_has_its_own_rank_and_all_have_one_meeting_point(batch):
    code, output = batch.run(script("--ds_config", "ds_configs/zero3.json"))
    assert code == 0, output
    started = batch.started()
    assert len(started) == 2 and all(words[:2] == ["-m", "torch.distributed.run"] for words in started)
    read = [get_args_parser().parse_args(words[2:]) for words in started]
    assert [each.node_rank for each in read] == [0, 1]
    for each in read:
        assert (each.nnodes, each.nproc_per_node, each.rdzv_backend) == ("2", "8", "static")
        assert (each.master_addr, each.master_port) == ("node1", 20000 + 1234)
        assert each.training_script == "train.py" and each.shutdown_timeout < 120
        of_the_job = ["--ds_config", "ds_configs/zero3.json", "--output_dir", "outputs/tiny-full-zero3"]
        assert each.training_script_args == ["--recipe", TINY, *of_the_job]
    assert "2 hosts of 8 ranks, node1:21234" in output and "start 1" in output
    assert not any("requeue" in call for call in batch.calls)


def test_with_restarts_launch_runs_inside_the_allocation(batch):
    written = script("--tokenizer_name_or_path", "it's", restarts=("--restarts", "3", "--min_hosts", "1"))
    code, output = batch.run(written, SLURM_NODEID="0", SLURM_GPUS_PER_NODE="h100:4")
    assert code == 0, output
    ((*launch, hostfile), rest) = batch.started()[0][:7], batch.started()[0][7:]
    assert launch == ["-m", "brigade", "launch", "--launcher", "slurm", "--hostfile"]
    assert Path(hostfile).read_text() == "node1 slots=4\nnode2 slots=4\n"
    Path(hostfile).unlink()
    restarts = ["--restarts", "3", "--min_hosts", "1"]
    assert rest == [*restarts, TINY, "--tokenizer_name_or_path", "it's", "--output_dir", "outputs/tiny-full-ddp"]
    assert "#SBATCH --no-kill\n" in written and "#SBATCH --no-kill\n" not in script()


def test_options_of_sbatch_win(batch):
    code, _ = batch.run(
        script(), SLURM_JOB_NUM_NODES="4", SLURM_GPUS_PER_NODE="h100:4", SLURM_GPUS_ON_NODE="8", SLURM_RESTART_COUNT="2"
    )
    read = [get_args_parser().parse_args(words[2:]) for words in batch.started()]
    assert code == 0 and [(each.node_rank, each.nnodes, each.nproc_per_node) for each in read] == [
        (rank, "4", "4") for rank in range(4)
    ]
    assert "srun --nodes=4" in batch.calls and "srun --ntasks=4" in batch.calls


def test_two_jobs_have_two_ports(batch):
    ports = set()
    for job_id in ("41234", "41235"):
        batch.run(script(), SLURM_JOB_ID=job_id)
        ports.add(get_args_parser().parse_args(batch.started()[0][2:]).master_port)
    assert len(ports) == 2 and all(1024 < port < 32768 for port in ports)


def test_flags_arrive_as_they_were_given(batch):
    """Each value is its own flag: spaces, quotes, line breaks and all."""
    keys = ["model_name_or_path", "revision", "tokenizer_name_or_path", "dataset_name", "dataset_config_name"]
    keys += ["validation_file", "chat_template", "gpu", "network"]
    for values in (NASTY[: len(keys)], NASTY[-len(keys) :]):
        flags = [f"--{key}={value}" for key, value in zip(keys, values, strict=True)]
        code, output = batch.run(script(*flags, "--output_dir", values[0]))
        assert code == 0, output
        for words in batch.started():
            assert words[words.index("train.py") + 1 :] == ["--recipe", TINY, *flags, "--output_dir", values[0]]
        shutil.rmtree(batch.directory / values[0])


@pytest.mark.parametrize("mode, code, said, stopped", [
    ("fail", 3, "", False),
    ("end quietly", 1, "there is no outputs/tiny-full-ddp/success.json", False),
    ("fail", 3, "", True),  # an earlier start
], ids=["a rank fails", "no success marker", "stopped before"])  # fmt: skip
def test_a_real_failure_fails_and_is_not_queued_again(batch, mode, code, said, stopped):
    if stopped:
        (batch.directory / "outputs/tiny-full-ddp").mkdir(parents=True)
        (batch.directory / "outputs/tiny-full-ddp/stopped.json").write_text('{"by": "SIGTERM"}')
    found, output = batch.run(script(), mode)
    assert found == code and said in output
    assert not any("requeue" in call for call in batch.calls)


def test_ranks_that_pre_emption_ended_are_queued_again(batch):
    """Without preempt_send_user_signal Slurm tells the step, not this script."""
    told = SCONTROL + 'if [ "$1 $2" = "show job" ]; then echo "   PreemptTime=2026-01-02T03:04:05"; fi\n'
    batch.program(batch.directory / "bin/scontrol", "#!/bin/bash\n" + told)
    code, output = batch.run(script(), "fail")
    assert code == 0 and "scontrol requeue 41234" in batch.calls, output


def test_notice_of_the_end_stops_the_ranks_and_queues_again(batch):
    code, output = noticed(batch, script())
    assert code == 0, output
    calls = [call for call in batch.calls if not call.startswith(("srun --", "scontrol show"))]
    assert calls == ["scancel --signal=TERM 41234", "scontrol requeue 41234"]
    assert "newest checkpoint" in output
    for pid in (batch.directory / "pids").read_text().split():
        assert not Path(f"/proc/{pid}").exists(), "a rank lives on"


@pytest.mark.parametrize("restarts", [(), ("--restarts", "3")], ids=["", "restarts"])
def test_a_job_whose_notice_comes_before_its_first_step_comes_back_so_often_and_no_more(batch, restarts):
    """Its ranks are told to end before train.py has counted anything."""
    written = script(restarts=restarts)
    for _ in range(starts.MOST):
        assert noticed(batch, written, 1 if restarts else 2)[0] == 0
        for path in batch.directory.glob("started-?"):
            path.unlink()
    requeued = batch.calls.count("scontrol requeue 41234")
    code, output = batch.run(written, "hang")
    assert code == 2 and "this job was started 3 times from step 0" in output, output
    assert requeued == batch.calls.count("scontrol requeue 41234") == starts.MOST and not batch.started()
    (batch.directory / "outputs/tiny-full-ddp/checkpoint-4").mkdir()
    (batch.directory / "outputs/tiny-full-ddp/checkpoint-4/trainer_state.json").touch()
    assert batch.run(written)[0] == 0, "it got further"


def test_a_notice_before_anything_was_started_queues_the_job_again(batch):
    code, output = batch.run(
        script(restarts=("--restarts", "3")).replace("trap on_notice USR1\n", "trap on_notice USR1\nkill -USR1 $$\n")
    )
    assert code == 0 and "scontrol requeue 41234" in batch.calls and not batch.started(), output


def test_a_run_that_ends_well_at_the_notice_is_not_queued_again(batch):
    (batch.directory / "outputs/tiny-full-ddp").mkdir(parents=True)
    (batch.directory / "outputs/tiny-full-ddp/success.json").touch()
    assert noticed(batch, script())[0] == 0 and not any("requeue" in call for call in batch.calls)


@pytest.mark.parametrize("by, again", [("SIGTERM to rank 1", True), ("SIGUSR1", True), ("the file stop", False)])
def test_a_run_that_was_stopped_is_queued_again_unless_somebody_wrote_the_file(batch, by, again):
    code, output = batch.run(script(), f"stopped by {by}")
    assert code == 0 and ("scontrol requeue 41234" in batch.calls) is again, output


def test_the_notice_is_as_long_as_the_run_has_measured_and_says_so(batch, tmp_path, monkeypatch):
    flags = ["--output_dir", str(tmp_path / "run")]
    assert "--signal=B:USR1@120" in script(*flags) and "nothing is measured yet" in script(*flags)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").touch()
    events.add(tmp_path / "run", "grace", step=7, seconds=433.2)
    written = script(*flags)
    assert "--signal=B:USR1@434" in written and "take up to 433 s" in written and "--shutdown_timeout 404" in written


def test_a_requeue_that_slurm_refuses_is_a_failure(batch):
    batch.program(batch.directory / "bin/scontrol", "#!/bin/bash\n" + SCONTROL + '[ "$1" != requeue ]\n')
    assert noticed(batch, script())[0] != 0


def test_started_by_hand_it_says_how(tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text(script())
    done = subprocess.run(["bash", path], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert done.returncode != 0 and "start this file with sbatch" in done.stderr


@pytest.mark.parametrize("recipe, gpus", [(TINY, None), ("recipes/qwen3-8b/full.yaml", "8")])
def test_what_slurm_is_asked_for(recipe, gpus):
    lines = script(recipe=recipe).splitlines()
    asks = [line for line in lines if line.startswith("#SBATCH")]
    asked = dict(re.fullmatch(r"#SBATCH --([\w-]+)(?:=(.*))?", line).groups() for line in asks)
    assert asked.pop("gpus-per-node", None) == gpus
    assert asked == {
        "job-name": f"{Path(recipe).parent.name}-full-2x8",
        "nodes": "2",
        "ntasks-per-node": "1",
        "exclusive": None,
        "mem": "0",
        "output": "%x-%j.out",
        "open-mode": "append",
        "requeue": None,
        "signal": "B:USR1@120",
    }
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:]), "sbatch would not read them"
    assert lines[0] == "#!/bin/bash" and lines[first_command] == "set -euo pipefail"
    assert all("$" not in line for line in lines if line.startswith("#SBATCH")), "sbatch expands no variable"


@pytest.mark.parametrize("flags, severity", [
    ([], "style"), (["--gpu", "H100"], "style"),
    ([f"--model_name_or_path={shlex.join(NASTY)}"], "warning"),  # it would only remark that '$HOME' is not expanded
])  # fmt: skip
@pytest.mark.parametrize("restarts", [(), ("--restarts", "3")], ids=["", "restarts"])
def test_shellcheck_finds_nothing(flags, severity, restarts, tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text(script(*flags, restarts=restarts))
    subprocess.run(["bash", "-n", path], check=True)
    shellcheck("--severity", severity, path)
