"""The image's files: hadolint reads the Dockerfile, sshd its configuration, and what they name is there."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
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


def test_secrets_and_runs_stay_out_of_an_image():
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    assert {".git", ".venv", "outputs", "keys"} <= set(ignored)


def test_shellcheck_has_nothing_to_say_about_the_start_of_sshd():
    done = subprocess.run([shellcheck(), CONTAINERS / "sshd"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_sshd_reads_its_configuration_as_an_ordinary_user():
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin") or pytest.fail("no sshd: apt-get install openssh-server")
    ordinary = {"user": "nobody"} if os.getuid() == 0 else {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        key, config = Path(folder, "host_key"), Path(folder, "sshd_config")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, **ordinary)
        config.write_text((CONTAINERS / "sshd_config").read_text().replace("/tmp/brigade-sshd/host_key", str(key)))
        shown = subprocess.run([sshd, "-T", "-f", config], capture_output=True, text=True, **ordinary)
    assert shown.returncode == 0, shown.stderr
    values = dict(line.partition(" ")[::2] for line in shown.stdout.splitlines())
    assert (values["port"], values["passwordauthentication"], values["permitrootlogin"]) == ("2222", "no", "no")
    asked = subprocess.run(["ssh", "-G", "-F", CONTAINERS / "ssh_config", "node1"], capture_output=True, text=True)
    assert "port 2222" in asked.stdout
