"""What `launch` would start on each host, what travels there, and whom it blames; nothing is started."""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from brigade.errors import UserError
from brigade.launch import environment, first_failure, launchers
from brigade.launch.connection import Channel, cure_of, transport
from brigade.launch.first_failure import Failure
from brigade.launch.job import make
from brigade.launch.status_and_logs import Output

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = tempfile.TemporaryDirectory()  # of launches
SECRET = "hf_neverInAFileOrOnACommandLine"


@pytest.fixture
def hostfile(tmp_path):
    def write(**slots):
        path = tmp_path / "hosts"
        path.write_text("".join(f"{host} slots={number}\n" for host, number in slots.items()))
        return str(path)

    return write


def launch(*words, open_files=4096, **variables):
    limited = ["bash", "-c", 'ulimit -n "$0" && exec "$@"', str(open_files)]
    command = [*limited, sys.executable, "-m", "brigade", "launch", *words]
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "BRIGADE_CACHE": CACHE.name} | variables
    return subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60)


# ---- commands --------------------------------------------------------------------------------------------------
TAILS = {
    "torchrun": "torchrun --nnodes 2 --nproc_per_node 4 --node_rank 1 --master_addr node1 --master_port 29500",
    "deepspeed": "deepspeed --hostfile {file} --no_ssh --node_rank 1 --master_addr node1 --master_port 29500",
    "accelerate": "accelerate launch --config_file {accelerate.yaml} --machine_rank 1 --main_process_ip node1 "
    "--main_process_port 29500",
}


@pytest.mark.parametrize("launcher", TAILS)
def test_dry_run_prints_each_hosts_command_and_no_value_of_a_variable(hostfile, launcher):
    file = hostfile(node1=4, node2=4)
    done = launch(
        "recipes/tiny/full.yaml",
        "--hostfile",
        file,
        "--launcher",
        launcher,
        "--dry-run",
        "--max_steps",
        "7",
        HF_TOKEN=SECRET,
        EDITOR="vi",
    )
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [line.split(":")[0] for line in commands] == ["node1", "node2"]
    expected = f"{Path(sys.executable).parent}/{TAILS[launcher]}".replace("{file}", file)
    assert commands[1] == f"node2: {expected} train.py --recipe recipes/tiny/full.yaml --max_steps 7"
    assert "HF_TOKEN" in done.stdout and SECRET not in done.stdout and "EDITOR" not in done.stdout


def test_the_strategy_chooses_the_launcher_unless_the_user_does(hostfile):
    file = hostfile(node1=2, node2=2)
    zero = make("recipes/tiny/full.yaml", ["--ds_config", "ds_configs/zero2.json"], file)
    ddp = make("recipes/tiny/full.yaml", [], file)
    assert launchers.choose(zero, None, False) == "deepspeed"
    assert launchers.choose(ddp, None, False) == "torchrun"
    assert launchers.choose(zero, "torchrun", False) == "torchrun"
    assert launchers.choose(zero, None, True) == "slurm"


def test_accelerate_refuses_hosts_of_different_sizes_and_the_others_take_them(hostfile, mistake):
    job = make("recipes/tiny/full.yaml", [], hostfile(node1=6, node2=2))
    message = mistake(launchers.choose, job, "accelerate", False)
    assert "node1 6, node2 2" in message and "--launcher torchrun or deepspeed" in message
    for launcher in ("torchrun", "deepspeed"):
        assert launchers.choose(job, launcher, False) == launcher
    words = launchers.command("torchrun", job, launchers.Place(1, "10.0.0.1", 1234))
    assert words[words.index("--nproc_per_node") + 1] == "2"


def test_mistakes_are_told_before_any_host_is_asked(hostfile):
    cases = {
        ("--hostfile", "nowhere"): "flag --hostfile",
        ("--launcher", "mpirun"): "there is no such launcher",
        ("--max_steps", "many"): "flag --max_steps",
        ("--learning_rat", "1"): "did you mean 'learning_rate'",
        ("--restrats", "1"): "did you mean 'restarts'",
        ("--batch_size", "4"): "per_device_train_batch_size",
        ("--global_batch_size", "3"): "does not give each of 4",
        ("--env", "NOT_SET_HERE"): "NOT_SET_HERE is not set",
        ("--env", f"MINE={SECRET}"): "can be read by every user",
        ("--launcher", "slurm"): "scontrol|no Slurm allocation",
    }
    file = hostfile(node1=2, node2=2)
    for words, part in cases.items():
        given = words if words[0] == "--hostfile" or words[1] == "slurm" else ("--hostfile", file, *words)
        done = launch("recipes/tiny/full.yaml", *given)
        assert done.returncode == 2 and done.stdout == ""
        assert any(one in done.stderr for one in part.split("|")) and done.stderr.count("\n") == 3, done.stderr
        assert SECRET not in done.stderr


def test_a_thousand_hosts_on_paper(tmp_path, hostfile):
    """No file, hash or process per host: what takes a thousandth of a second each would show. (How fast it is stands in
    docs/launching.md; here only that the work does not grow faster than the hosts.)"""
    path = tmp_path / "hosts"
    path.write_text("".join(f"node{number} slots=8\n" for number in range(1, 1001)))
    done = launch("recipes/tiny/full.yaml", "--hostfile", str(path), "--dry-run", "--global_batch_size", "8000")
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(commands) == 1000 and "--node_rank 999 " in commands[-1]
    one = launch("recipes/tiny/full.yaml", "--hostfile", hostfile(node1=1), "--dry-run")
    assert one.stdout.startswith("# 1 rank on 1 host, ")


# ---- what hosts say --------------------------------------------------------------------------------------------
@pytest.fixture
def launch_there(hostfile, tmp_path):
    """A launch on hosts of which testbed/stand_in/ssh takes the place."""

    def run(count, *words, **more):
        file = hostfile(**{f"node{number}": 1 for number in range(1, count + 1)})
        there = {"PATH": f"{REPOSITORY}/testbed/stand_in:/usr/bin:/bin"}
        return launch(
            "recipes/tiny/full.yaml",
            "--hostfile",
            file,
            "--launcher",
            "torchrun",
            "--global_batch_size",
            str(count),
            "--log_dir",
            str(tmp_path / "logs"),
            *words,
            **there | more,
        )

    return run


def test_of_many_hosts_a_summary_is_printed_and_logs_are_the_users_alone(launch_there, tmp_path):
    done = launch_there(40, open_files=300)  # fewer than three pipes and a log for each
    assert done.returncode == 0, done.stderr
    assert "40 hosts: " in done.stderr and done.stderr.count("\n") < 20
    output = REPOSITORY / "outputs" / "tiny-full-ddp" / "success.json"  # whatever its ranks say
    assert f"succeeded: {output}; logs" in done.stderr
    logs = sorted((tmp_path / "logs").iterdir())
    assert len(logs) == 40 and logs[0].read_text().startswith("ready\n")
    assert {oct(path.stat().st_mode & 0o777) for path in logs} == {"0o600"}
    assert oct((tmp_path / "logs").stat().st_mode & 0o777) == "0o700"


def test_a_launch_goes_on_without_its_terminal_and_is_followed(launch_there, tmp_path):
    done = launch_there(2, "--detach", "--output_dir", str(tmp_path / "run"))
    assert done.returncode == 0 and f"attach {tmp_path / 'run'}" in done.stdout and "kill " in done.stdout, done.stderr
    for named in ("run", "logs"):
        follow = [sys.executable, "-m", "brigade", "attach", str(tmp_path / named)]
        env = {"BRIGADE_CACHE": CACHE.name}
        said = subprocess.run(follow, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60)
        assert said.returncode == 0 and "\ntrained\n" in said.stdout and "succeeded: " in said.stdout, said
    assert oct((tmp_path / "logs/launch.log").stat().st_mode & 0o777) == "0o600"
    said = subprocess.run(
        [*follow[:-1], str(tmp_path)], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60
    )
    assert said.returncode == 2 and "no launch of it is known here" in said.stderr


def test_of_a_long_log_the_beginning_and_the_end_are_kept(tmp_path):
    with Output(["node1"], tmp_path / "logs", limit=0.001) as output:  # about 1,000 bytes
        for number in range(200):
            output.keep("rank-0-node1", f"line {number:03d} of a rank that talks")
    logs = {path.name: path.read_text().splitlines() for path in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == ["rank-0-node1.before.log", "rank-0-node1.first.log", "rank-0-node1.log"]
    assert logs["rank-0-node1.first.log"][0].startswith("line 000")
    assert (logs["rank-0-node1.before.log"] + logs["rank-0-node1.log"])[-1].startswith("line 199")
    assert sum(map(len, logs.values())) < 200


def test_more_hosts_than_open_files_are_refused(launch_there):
    done = launch_there(40, open_files=200)
    assert (done.returncode, done.stderr.count("\n")) == (2, 3)
    assert "40 hosts" in done.stderr and "200, is enough for 18" in done.stderr and "nofile" in done.stderr


NONSENSE = {
    '{"is": "stop"}': "no kind of message: 'stop'",
    '{"is": "lost", "why": "x"}': "no kind of message: 'lost'",
    '{"is": ["rank"]}': "no kind of message",
    "[]": "no kind of message",
    "[" * 100_000: "nobody understands",
    '{"is": "ended", "code": "0"}': "code: Input should be a valid integer",
    '{"is": "rank", "out": "x"}': "rank: Field required",
    '{"is": "rank", "rank": 0, "marker": true}': "rank 0 is not on this host",
    '{"is": "rank", "rank": -1, "exit": 1}': "rank -1 is not on this host",
    '{"is": "rank", "rank": 1, "exit": -1000}': "exit: Input should be greater",
}


@pytest.mark.parametrize("message", NONSENSE)
def test_a_host_that_says_nonsense_is_lost(message):
    hello = {"is": "hello", "host": "", "machine": "", "versions": {}, "project": "", "gpus": 0, "addresses": {}}
    agent = [
        sys.executable,
        "-c",
        f"print('brigade> {json.dumps(hello)}\\nbrigade>', {message!r}, flush=True); input()",
    ]

    async def hear():
        channel = Channel("node2", range(1, 2), agent, asyncio.Queue())
        await channel.connect()
        return await asyncio.wait_for(channel.events.get(), 10)

    _, kind, fields = asyncio.run(hear())
    assert kind == "lost" and "it said what nobody understands" in fields["why"] and NONSENSE[message] in fields["why"]


def test_nothing_that_one_host_says_of_anothers_rank_is_believed(launch_there):
    done = launch_there(2, STAND_IN_NODE2_SAYS='{"is": "rank", "rank": 0, "marker": true}')
    assert done.returncode == 1 and "rank 0 is not on this host" in done.stderr, done.stderr
    assert "error: node2 failed first: the host was lost: it said what nobody understands" in done.stderr
    assert "succeeded" not in done.stderr and "Traceback" not in done.stderr


def test_only_rank_0_says_that_the_run_reached_its_end(launch_there):
    done = launch_there(2, STAND_IN_NODE2_SAYS='{"is": "rank", "rank": 1, "marker": true}')
    assert done.returncode == 1 and "no success.json" in done.stderr and "succeeded" not in done.stderr


def test_no_terminal_obeys_what_a_rank_prints(launch_there, tmp_path):
    said = "\033]0;title\a\033[2Jlast \033[31mwords\033[0m\x9b5m\b\b\r\n\tat line 1"
    done = launch_there(2, STAND_IN_NODE2_SAYS=json.dumps({"is": "rank", "rank": 1, "out": said, "exit": 3}))
    assert "  | last words5m\n  | \tat line 1" in done.stderr, done.stderr
    text = done.stdout + done.stderr + (tmp_path / "logs" / "rank-1-node2.log").read_text()
    assert not [character for character in text if not character.isprintable() and character not in "\n\t"]


# ---- what travels ----------------------------------------------------------------------------------------------
def test_training_needs_travel_and_nothing_else():
    env = {
        "HF_TOKEN": "t",
        "HF_HOME": "/h",
        "WANDB_API_KEY": "k",
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth1",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "LD_LIBRARY_PATH": "/l",
        "PATH": "/p",
        "https_proxy": "x",
        "HOME": "/root",
        "SSH_AUTH_SOCK": "/s",
        "AWS_SECRET_ACCESS_KEY": "a",
        "SLURM_JOB_ID": "1",
        "BRIGADE_DOOR": "d",
        "TORCHELASTIC_RUN_ID": "r",
        "DISPLAY": ":0",
    }
    kept = {
        "HOME",
        "SSH_AUTH_SOCK",
        "AWS_SECRET_ACCESS_KEY",
        "SLURM_JOB_ID",
        "BRIGADE_DOOR",
        "TORCHELASTIC_RUN_ID",
        "DISPLAY",
    }
    assert set(env) - set(environment.forwarded(env, [])) == kept
    assert environment.forwarded(env, ["AWS_SECRET_ACCESS_KEY"])["AWS_SECRET_ACCESS_KEY"] == "a"
    with pytest.raises(UserError, match="ABSENT is not set"):
        environment.forwarded(env, ["ABSENT"])


def test_ssh_is_the_users_own_and_is_not_asked_for_this_host():
    import socket

    words = transport("node7", "torchrun")
    assert words[0] == "ssh" and "BatchMode=yes" in words and words[-2] == "node7"
    assert not any(word.startswith(("-F", "-i", "-p", "-l", "-J", "User=", "Port=")) for word in words)
    assert transport(socket.gethostname(), "torchrun")[0] == transport("localhost", "deepspeed")[0] == sys.executable
    assert transport("node7", "slurm")[0] == "srun"
    # What begins with "-" is a host all the same, and no option.
    assert transport("-oProxyCommand=false", "torchrun")[-3:-1] == ["--", "-oProxyCommand=false"]
    assert "--nodelist=-x" in transport("-x", "slurm")


SAID = {
    "root@node7: Permission denied (publickey).": "ssh-copy-id node7",
    "Host key verification failed.": "known_hosts",
    "ssh: Could not resolve hostname node7: Name or service not known": "hostfile",
    "ssh: connect to host node7 port 22: Connection timed out": "is it up",
    "bash: line 1: /opt/brigade/.venv/bin/python: No such file or directory (ssh ended with 127)": str(REPOSITORY),
    "bash: line 1: cd: /opt/brigade: No such file or directory": "same paths",
    "kex_exchange_identification: something new": "ssh node7 hostname",
}


@pytest.mark.parametrize("problem", SAID)
def test_what_ssh_says_has_a_cure(problem):
    assert SAID[problem] in cure_of(problem, "node7")


# ---- whom to blame ---------------------------------------------------------------------------------------------
def failure(at, kind, host="node1", rank=0, code=1, text=""):
    return Failure(at, kind, host, rank, code, text)


def test_the_earliest_failure_is_the_first():
    early, late = failure(1.0, "reported", "node2", 3), failure(1.5, "exit")
    assert first_failure.first([late, early]) is early


def test_a_lost_host_or_a_killed_rank_explains_closed_connections():
    told = failure(1.0, "reported")
    lost, killed = failure(2.0, "lost", "node2", None, None), failure(1.2, "signal", "node2", 1, -9)
    assert first_failure.first([told, killed]) is killed
    assert first_failure.first([told, killed, lost]) is lost
    much_later = failure(60.0, "lost", "node2", None, None)
    assert first_failure.first([told, much_later]) is told


def test_what_a_launcher_does_to_its_other_ranks_is_no_cause():
    raised = failure(1.0, "reported", "node2", 3)
    ended = [failure(1.3, "signal", "node2", 2, -15), failure(1.4, "signal", "node1", 0, -6)]
    assert first_failure.first([*ended, raised]) is raised


def test_a_rank_that_follows_is_the_cause_only_where_nothing_else_is():
    follows, exits = failure(1.0, "follows", "node2", 3), failure(4.0, "exit")
    assert first_failure.first([follows, exits]) is exits
    assert first_failure.first([follows]) is follows and "another rank failed first" in follows.in_words()


def test_exit_codes_and_words():
    assert failure(0, "reported", code=2).exit_code == 2
    assert failure(0, "signal", code=-9).exit_code == 1
    said = failure(0, "signal", "node2", 1, -9)
    assert said.in_words() == "node2, rank 1 failed first: killed by signal 9 (SIGKILL)"
    assert "out-of-memory" in said.cure([]) and "node2" in said.cure([])
    assert failure(0, "signal", code=-35).in_words().endswith("killed by signal 35 (signal 35)")


def test_a_full_disk_is_named_wherever_it_fills(tmp_path, monkeypatch, capsys):
    raised = failure(0, "reported", "node2", 1)
    lines = first_failure.report(raised, ["OSError: [Errno 28] No space left on device: '/scratch/x'"], tmp_path)
    assert lines[-1].startswith("  cure: make room: a disk of node2 is full") and "df -h" in lines[-1]
    monkeypatch.setattr(Output, "path", lambda *_: Path("/dev/full"))
    with Output(["node1"], tmp_path) as output:
        output.keep("rank-0-node1", "words")
        output.say("and on")
    said = capsys.readouterr()
    assert "lost from here on: [Errno 28] No space left on device: '/dev/full'; the run goes on" in said.err
    assert said.out == "and on\n"


# ---- the far end -----------------------------------------------------------------------------------------------
def talk(*orders, seconds=5.0):
    """What an agent of this host says to these orders until it has ended."""
    agent = subprocess.Popen(
        [sys.executable, "-m", "brigade.launch.agent"],
        cwd=REPOSITORY,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    for order in orders:
        agent.stdin.write(json.dumps(order) + "\n")
        agent.stdin.flush()
    time.sleep(seconds)
    begun = time.monotonic()
    out, _ = agent.communicate(timeout=30)
    lines = [json.loads(line.removeprefix("brigade> ")) for line in out.splitlines() if line]
    return lines, time.monotonic() - begun


def test_an_agent_whose_channel_closes_stops_everything_even_what_ignores_sigterm():
    stubborn = (
        "import os, signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print('up', flush=True)\ntime.sleep(600)"
    )
    order = {
        "do": "start",
        "run": f"test-{time.monotonic_ns()}",
        "command": [sys.executable, "-c", stubborn],
        "cwd": str(REPOSITORY),
        "environment": {},
        "files": {},
    }
    lines, seconds = talk(order, seconds=1.5)
    kinds = [line["is"] for line in lines]
    assert kinds[0] == "hello" and "stopped" in kinds
    assert {"is": "launcher", "out": "up"} in lines
    assert seconds < 15
    from brigade.launch.host_facts import processes

    assert processes(order["run"]) == []


def test_an_agent_answers_orders_and_names_who_holds_a_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        lines, _ = talk(
            {"do": "listen", "id": 1, "port": port, "nonce": ""},
            {"do": "files", "id": 2, "paths": ["/", "/nowhere"]},
            seconds=1,
        )
    answers = {line["id"]: line for line in lines if line["is"] == "answer"}
    assert "process" in answers[1]["taken"] and answers[2]["missing"] == ["/nowhere"]
    hello = lines[0]
    assert hello["versions"]["torch"].startswith("2.") and len(hello["project"]) == 12
