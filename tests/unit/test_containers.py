"""The image's files: hadolint reads the Dockerfile, sshd its configuration, and what they name is there."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from brigade.train.recipe.files import REPOSITORY
from testing.programs import shellcheck

CONTAINERS = REPOSITORY / "containers"
DOCKERFILE = (CONTAINERS / "Dockerfile").read_text()


def test_hadolint_finds_nothing_to_say():
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([program, CONTAINERS / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_image_runs_as_a_user_without_rights():
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.M)[1:]
    users = [re.findall(r"^USER (.+)", stage, re.M) for stage in stages]
    assert len(stages) == 3 and all(user[-1] == "${UID}:${GID}" for user in users if user)
    assert stages[-1] == "brigade\n", "what is built without --target has no sshd"


def test_what_the_images_copy_is_in_the_repository():
    apptainer = (CONTAINERS / "apptainer.def").read_text()
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?:--\S+ )?(.+)", DOCKERFILE, re.M)]
    copied.append(re.findall(r"^    (\S+) /opt", apptainer.partition("%post")[0], re.M))
    assert len(copied) == 4 and all((REPOSITORY / name).exists() for names in copied for name in names)
    assert re.search(r"From: (\S+)", apptainer)[1] == re.search(r"ARG BASE=(\S+)", DOCKERFILE)[1]


def test_a_session_over_ssh_has_the_images_own_variables():
    stage = re.search(r"^ENV ((?:.*\\\n)*.*)", DOCKERFILE, re.M)[1]
    image = dict(word.split("=", 1) for word in stage.replace("\\\n", " ").split())
    session = re.search(r"^SetEnv (.+)", (CONTAINERS / "sshd_config").read_text(), re.M)[1]
    assert image.pop("PATH").partition(":")[0] in session
    assert image and all(f" {name}={value}" in session for name, value in image.items())


def test_no_kernel_of_the_building_hosts_processor_is_in_an_image():
    """DeepSpeed compiles cpu_adam with -march=native (op_builder/builder.py: cpu_arch): another processor may not run it."""
    assert "make kernels" not in DOCKERFILE.replace("`make kernels`", "")
    assert "TORCH_EXTENSIONS_DIR=/cache/" in DOCKERFILE and "g++" in DOCKERFILE


def test_images_are_named_by_digest_and_packages_and_code_are_roots():
    base = re.search(r"^ARG BASE=(\S+)", DOCKERFILE, re.M)[1]
    assert re.fullmatch(r"nvidia/cuda:[\w.-]+@sha256:[0-9a-f]{64}", base)
    assert base.rpartition("@")[2] in (REPOSITORY / "docs" / "containers.md").read_text()
    first = DOCKERFILE.partition("AS brigade\n")[2].partition("\nFROM ")[0]
    before, user, after = first.partition("USER ${UID}:${GID}")
    assert user and "--chown" not in DOCKERFILE and "RUN" not in after, (
        "whoever owns the packages decides what the next run does"
    )
    assert "pip install" in before and "make setup" in before and "ln -s /outputs outputs" in before


def made_keys(folder):
    subprocess.run([CONTAINERS / "make_keys", folder], check=True, timeout=60)
    return folder


def test_the_keys_of_a_cluster_are_made_once_with_what_its_hosts_believe(tmp_path):
    keys = made_keys(tmp_path / "keys")
    named = {"id_ed25519", "id_ed25519.pub", "host_key", "host_key.pub", "authorized_keys", "known_hosts"}
    assert {path.name for path in keys.iterdir()} == named
    assert all(not path.stat().st_mode & 0o77 for path in keys.iterdir())
    assert (keys / "known_hosts").read_text() == f"* {(keys / 'host_key.pub').read_text()}"
    again = subprocess.run([CONTAINERS / "make_keys", keys], capture_output=True, text=True)
    assert again.returncode == 2 and "cure: name another directory" in again.stderr
    ask = ["ssh", "-G", "-F", CONTAINERS / "ssh_config", "node1"]
    asked = subprocess.run(ask, capture_output=True, text=True).stdout
    assert "stricthostkeychecking true" in asked and "userknownhostsfile /keys/known_hosts" in asked
    assert "HostKey /keys/host_key" in (CONTAINERS / "sshd_config").read_text()
    assert "/keys/host_key /keys/known_hosts" in (CONTAINERS / "sshd").read_text()


def test_secrets_and_runs_stay_out_of_an_image():
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    assert {".git", ".venv", "outputs", "keys"} <= set(ignored)


def test_shellcheck_has_nothing_to_say_about_the_scripts():
    shellcheck(CONTAINERS / "sshd", CONTAINERS / "make_keys")


@pytest.mark.slow
def test_sshd_reads_its_configuration_as_an_ordinary_user():
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin") or pytest.fail("no sshd: apt-get install openssh-server")
    ordinary = {"user": "nobody"} if os.getuid() == 0 else {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        key, config = Path(folder, "host_key"), Path(folder, "sshd_config")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, **ordinary)
        config.write_text((CONTAINERS / "sshd_config").read_text().replace("/keys/host_key", str(key)))
        shown = subprocess.run([sshd, "-T", "-f", config], capture_output=True, text=True, **ordinary)
    assert shown.returncode == 0, shown.stderr
    values = dict(line.partition(" ")[::2] for line in shown.stdout.splitlines())
    assert (values["port"], values["passwordauthentication"], values["permitrootlogin"]) == ("2222", "no", "no")
    asked = subprocess.run(["ssh", "-G", "-F", CONTAINERS / "ssh_config", "node1"], capture_output=True, text=True)
    assert "port 2222" in asked.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    os.getuid() != 0, reason="an ordinary user's sshd lets only that user in, by a shell that this one may not have"
)
def test_a_host_that_shows_another_key_than_the_clusters_is_not_believed(tmp_path):
    """The files as in the image, with another folder and port: a container of the cluster, and a stranger under its name."""
    ours, strangers = made_keys(tmp_path / "ours"), made_keys(tmp_path / "strangers")
    Path("/run/sshd").mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def said(keys, config):
        return (CONTAINERS / config).read_text().replace("/keys/", f"{keys}/").replace("Port 2222", f"Port {port}")

    (tmp_path / "ssh_config").write_text(said(ours, "ssh_config"))
    (ours / "authorized_keys").replace(strangers / "authorized_keys")
    answers = []
    for keys in (ours, strangers):
        text = said(keys, "sshd_config").replace(f"{keys}/authorized_keys", f"{strangers}/authorized_keys")
        (tmp_path / "sshd_config").write_text(text.replace("/tmp/brigade-sshd/pid", str(tmp_path / "pid")))
        words = ["/usr/sbin/sshd", "-D", "-e", "-f", tmp_path / "sshd_config", "-o", "PermitRootLogin=yes"]
        daemon = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        try:
            for _ in range(100):
                line = ["ssh", "-F", tmp_path / "ssh_config", "-o", "BatchMode=yes", "127.0.0.1", "echo", "in"]
                answers.append(subprocess.run(line, capture_output=True, text=True, timeout=20))
                if "refused" not in answers[-1].stderr:
                    break
                time.sleep(0.05)
        finally:
            daemon.terminate()
            daemon.wait(10)
    first, second = (one for one in answers if "refused" not in one.stderr)
    assert first.stdout == "in\n", first.stderr
    assert second.returncode == 255 and "Host key verification failed" in second.stderr
