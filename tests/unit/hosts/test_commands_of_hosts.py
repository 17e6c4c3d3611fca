"""What `launch` would start on each host, and mistakes that are told before any host is asked."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brigade.hosts import ssh
from brigade.hosts.connection import CURES, cure_of, transport
from brigade.hosts.job import forwarded, hosts_of_slurm_job, make
from brigade.launch import command, launchers
from testing.launches import REPOSITORY, SECRET, launch, launch_here

TAILS = {
    "torchrun": "torchrun --nnodes 2 --nproc_per_node 4 --node_rank 1 --master_addr node1 --master_port 29500",
    "deepspeed": "deepspeed --hostfile {file} --no_ssh --node_rank 1 --master_addr node1 --master_port 29500",
    "accelerate": "accelerate launch --config_file {accelerate.yaml} --machine_rank 1 --main_process_ip node1 "
    "--main_process_port 29500",
}


@pytest.mark.parametrize("launcher", TAILS)
def test_dry_run_prints_each_hosts_command_and_no_value_of_a_variable(hostfile, launcher):
    file = hostfile(node1=4, node2=4)
    words = ["recipes/tiny/full.yaml", "--hostfile", file, "--launcher", launcher, "--dry-run", "--max_steps", "7"]
    done = launch_here(*words, HF_TOKEN=SECRET, EDITOR="vi")
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
        done = launch_here("recipes/tiny/full.yaml", *given)
        assert done.returncode == 2 and done.stdout == ""
        assert any(one in done.stderr for one in part.split("|")) and done.stderr.count("\n") == 3, done.stderr
        assert SECRET not in done.stderr


@pytest.mark.parametrize("words, flag", [
    (["--to", "mine.sbatch"], "flag --to"),
    *((["--write", "kubernetes", *more], f"flag {more[0]}") for more in (
        ["--env", "HOME"], ["--launcher", "torchrun"], ["--dry-run"], ["--detach"], ["--restart_pause", "0"],
    )),
], ids=str)  # fmt: skip
def test_a_flag_that_a_job_file_does_not_hold_is_refused(hostfile, mistake, words, flag):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    file = hostfile(node1=2)
    options = parser.parse_args(["recipes/tiny/full.yaml", "--hostfile", file, *words])
    assert flag in mistake(command.run, options)


@pytest.mark.parametrize("asked, slots", [("8", 8), ("h100:8", 8), ("a100:4,v100:4", 8), ("", 1)])
def test_an_allocation_gives_a_slot_for_each_gpu(tmp_path, monkeypatch, asked, slots):
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho n1; echo n2\n")
    (tmp_path / "scontrol").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = hosts_of_slurm_job({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_PER_NODE": asked})
    assert found == {"n1": slots, "n2": slots}


def test_a_container_without_slurms_client_is_told(monkeypatch, mistake):
    monkeypatch.setenv("PATH", "/nowhere")
    message = mistake(hosts_of_slurm_job, {"SLURM_JOB_NODELIST": "n1"})
    assert "cannot be started" in message and "client" in message


def test_a_thousand_hosts_on_paper(tmp_path, hostfile):
    """No file, hash or process per host: what takes a thousandth of a second each would show. (How fast it is stands in
    docs/evidence/scale.md; here only that the work does not grow faster than the hosts.)"""
    path = tmp_path / "hosts"
    path.write_text("".join(f"node{number} slots=8\n" for number in range(1, 1001)))
    done = launch("recipes/tiny/full.yaml", "--hostfile", str(path), "--dry-run", "--global_batch_size", "8000")
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(commands) == 1000 and "--node_rank 999 " in commands[-1]
    one = launch("recipes/tiny/full.yaml", "--hostfile", hostfile(node1=1), "--dry-run")
    assert one.stdout.startswith("# 1 rank on 1 host, ")


def test_training_needs_travel_and_nothing_else(mistake):
    of_services = {"HF_TOKEN", "HF_HOME", "WANDB_API_KEY", "https_proxy"}
    of_ranks = {"NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}
    of_programs = {"PATH", "LD_LIBRARY_PATH"}
    of_a_login = {"HOME", "SSH_AUTH_SOCK", "AWS_SECRET_ACCESS_KEY", "DISPLAY"}
    of_another_job = {"SLURM_JOB_ID", "BRIGADE_DOOR", "TORCHELASTIC_RUN_ID"}
    env = dict.fromkeys(of_services | of_ranks | of_programs | of_a_login | of_another_job, "a")
    assert set(env) - set(forwarded(env, [])) == of_a_login | of_another_job
    assert forwarded(env, ["AWS_SECRET_ACCESS_KEY"])["AWS_SECRET_ACCESS_KEY"] == "a"
    assert "ABSENT is not set" in mistake(forwarded, env, ["ABSENT"])


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
    "its channel closed (ssh ended with 0)": "look for `exit`",
    "This account is currently not available. (ssh ended with 1)": "runs no commands on node7",
    'Please login as the user "ubuntu" rather than the user "root". (ssh ended with 142)': "User NAME",
    "bash: line 1: cd: restricted (ssh ended with 1)": "runs no commands",
    "Permissions 0644 for '/home/me/.ssh/id_rsa' are too open. / bad permissions / Permission denied (publickey).": "chmod 600",
    "Received disconnect from 10.0.0.7 port 22:2: Too many authentication failures": "IdentitiesOnly",
    "Fatal Python error: init_fs_encoding / ModuleNotFoundError: No module named 'encodings' (ssh ended with 1)": "PYTHONPATH",
    "ImportError: cannot import name 'x' from 'json' (/opt/py27/json.py) (ssh ended with 1)": "PYTHONPATH",
    "kex_exchange_identification: something new": "ssh node7 hostname",
}


@pytest.mark.parametrize("problem", SAID)
def test_what_ssh_says_has_a_cure(problem, monkeypatch):
    monkeypatch.setattr(ssh, "locked_key", lambda host: "")  # whoever runs this may have one
    assert SAID[problem] in cure_of(problem, "node7")


needs_ssh = pytest.mark.skipif(not shutil.which("ssh"), reason="without an ssh client")
BY_HAND = """Host *
  RemoteCommand tmux attach
  StdinNull yes
  ForkAfterAuthentication yes
  SessionType none
  RequestTTY force
"""


@needs_ssh
def test_what_the_users_config_says_of_logins_by_hand_does_not_count(tmp_path):
    (tmp_path / "config").write_text(BY_HAND if ssh.version() >= (8, 7) else BY_HAND[: BY_HAND.index("  Stdin")])

    def effective(*flags):
        line = ["ssh", "-F", str(tmp_path / "config"), *flags, "-G", "node7"]
        return subprocess.run(line, capture_output=True, text=True, check=True, timeout=20).stdout

    assert "remotecommand tmux" in effective() and "requesttty force" in effective()
    found = effective(*ssh.options())
    assert "tmux" not in found and "requesttty false" in found and "serveraliveinterval 0" in found
    if ssh.version() >= (8, 7):
        assert all(line in found for line in ("stdinnull no", "forkafterauthentication no", "sessiontype default"))


def test_an_old_ssh_gets_no_option_that_it_does_not_know(monkeypatch):
    monkeypatch.setattr(ssh, "version", lambda: (8, 2))
    assert "RemoteCommand=none" in ssh.options() and "StdinNull=no" not in ssh.options()
    monkeypatch.setattr(ssh, "version", lambda: (9, 2))
    assert "StdinNull=no" in ssh.options()


@needs_ssh
def test_a_key_that_asks_for_a_passphrase_is_named(tmp_path, monkeypatch):
    for name, passphrase in (("open", ""), ("locked", "secret")):
        line = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(tmp_path / name)]
        subprocess.run(line, check=True, timeout=20)
    (tmp_path / "pem").write_text("-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nMIIE\n")
    assert [ssh.is_locked(tmp_path / name) for name in ("open", "locked", "pem")] == [False, True, True]
    held = (tmp_path / "locked.pub").read_text()
    known = f"identityfile {tmp_path}/absent\nidentityfile {tmp_path}/open\nidentityfile {tmp_path}/locked\n"

    def cure(of_agent):
        monkeypatch.setattr(ssh, "said", lambda *words: of_agent if words[0] == "ssh-add" else known)
        ssh.locked_key.cache_clear()
        return cure_of("root@node7: Permission denied (publickey).", "node7")

    assert f"`ssh-add {tmp_path}/locked`" in cure("The agent has no identities.") and "passphrase" in cure("")
    assert cure(held) == CURES["ssh"]["Permission denied"].replace("HOST", "node7")
    ssh.locked_key.cache_clear()


def test_a_variable_that_names_another_python_does_not_reach_the_agent():
    assert "exec env -u PYTHONHOME -u PYTHONSAFEPATH " in transport("node7", "torchrun")[-1]
