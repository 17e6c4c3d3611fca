"""What the tests of `launch` share: hostfiles, and hosts of which testbed/stand_in/ssh takes the place."""

import pytest

from testing.launches import REPOSITORY, launch


@pytest.fixture
def hostfile(tmp_path):
    def write(**slots):
        path = tmp_path / "hosts"
        path.write_text("".join(f"{host} slots={number}\n" for host, number in slots.items()))
        return str(path)

    return write


@pytest.fixture
def launch_there(hostfile, tmp_path):
    """A launch on hosts of which testbed/stand_in/ssh takes the place."""

    def run(count, *words, **more):
        file = hostfile(**{f"node{number}": 1 for number in range(1, count + 1)})
        there = {"PATH": f"{REPOSITORY}/testbed/stand_in:/usr/bin:/bin"}
        always = ["--launcher=torchrun", f"--global_batch_size={count}", f"--log_dir={tmp_path / 'logs'}"]
        return launch("recipes/tiny/full.yaml", "--hostfile", file, *always, *words, **there | more)

    return run
