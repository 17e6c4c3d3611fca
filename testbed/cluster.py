"""Building and taking down a cluster."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from .host import BARE_PATH, IP_BATCH, PROJECT, Host, Site, in_network, namespace
from .needs import missing

# Where clusters lie: not in /tmp or /run, which hosts have to themselves.
PARENT, PREFIX = Path(os.environ.get("BRIGADE_TESTBED", "/var/tmp")), "brigade-testbed-"


class Cluster:
    """`count` hosts node1, node2, ... on a switch of their own; a context manager.

    directory: everything of this cluster; its `shared` is seen by all hosts at the same path, as is the project
    bare: names of hosts on which a remote shell does not find the environment's programs; default: the last one
    """

    def __init__(self, count: int, bare: tuple[str, ...] | None = None, python: str = sys.executable) -> None:
        lacks = missing()
        if lacks:
            raise RuntimeError("no cluster can be built here:\n" + "\n".join(f"  {line}" for line in lacks))
        self.python = python
        self.directory, self._lock = begin()
        self.home, self.shared = self.directory / "home", self.directory / "shared"
        self.shared.mkdir()
        cache = Path.home() / ".cache"
        cache.mkdir(exist_ok=True)
        # First where things lie, then the names that lead there: .venv may be a link, and its bin one more.
        real = Path(sys.prefix, "bin").resolve().parent
        places = [Path(path) for path in (PROJECT, sys.prefix, real, sys.base_prefix, cache)]
        visible = list(dict.fromkeys(map(str, [*sorted(path.resolve() for path in places), *places])))
        site = Site(self.directory, self.home, visible, python, self._in_switch)
        names = [f"node{number}" for number in range(1, count + 1)]
        bare = (names[-1],) if bare is None and count > 1 else bare or ()
        with_environment = f"{Path(python).parent}:{BARE_PATH}"
        self.hosts = [
            Host(site, number, name, BARE_PATH if name in bare else with_environment)
            for number, name in enumerate(names)
        ]
        self._furnish()

    def __enter__(self) -> "Cluster":
        try:
            command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
            null = subprocess.DEVNULL  # whoever reads our output is not to wait for this one
            self.switch = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
            while namespace(self.switch.pid, "net") == namespace("self", "net") and self.switch.poll() is None:
                time.sleep(0.001)
            self._in_switch(*IP_BATCH, lines="link add switch type bridge\nlink set switch up")
            for host in self.hosts:
                host.boot()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def __getitem__(self, name: str) -> Host:
        found = next((host for host in self.hosts if host.name == name), None)
        if found is None:
            raise KeyError(f"no host {name!r}; there are {', '.join(host.name for host in self.hosts)}")
        return found

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def down(self) -> None:
        """Stop every host and remove the cluster's directory."""
        for process in [*(host.process for host in self.hosts), getattr(self, "switch", None)]:
            if process is not None:
                process.kill()
                process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._lock.close()

    def _in_switch(self, *words: str, **options: Any) -> None:
        in_network(self.switch.pid, *words, **options)

    def hostfile(self, slots: int | dict[str, int], name: str = "hostfile") -> Path:
        """A hostfile of this cluster in its shared directory."""
        path = self.shared / name
        slots = dict.fromkeys((host.name for host in self.hosts), slots) if isinstance(slots, int) else slots
        path.write_text("".join(f"{host} slots={number}\n" for host, number in slots.items()))
        return path

    def heal(self) -> None:
        """Undo every fault: links repaired, limits and blocks lifted, hosts that are off booted, stray processes ended."""
        for host in self.hosts:
            if host.process is None:
                host.boot()
            host.restore()
            host.throttle(None)
            host.unblock()
            host.kill()

    def _furnish(self) -> None:
        """Keys, host names and configuration files."""
        ssh = self.home / ".ssh"
        ssh.mkdir(parents=True, mode=0o700)
        _key(ssh / "id_ed25519")
        (self.directory / "resolv.conf").write_text(
            # Whoever asks is refused at once: without an answer torch's store waits tens of seconds for reverse look-ups.
            "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"
        )
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.hosts)]
        (self.directory / "etc_hosts").write_text("\n".join(lines) + "\n")
        known = []
        for host in self.hosts:
            etc = host.directory / "ssh"
            etc.mkdir(parents=True)
            _key(etc / "host_key")
            known.append(f"{host.name},{host.address} {(etc / 'host_key.pub').read_text().strip()}")
            shutil.copy(ssh / "id_ed25519.pub", etc / "authorized_keys")
            (host.directory / "hostname").write_text(host.name + "\n")
        (ssh / "known_hosts").write_text("\n".join(known) + "\n")
        self._write_ssh_config(ssh)

    def _write_ssh_config(self, ssh: Path) -> None:
        """A configuration with which `ssh` reaches the hosts from outside: its proxy steps into the host's namespaces and
        starts an sshd there, so that no address has to be reachable."""
        enter = 'nsenter -t "$(cat {pid})" -n -u -m -i -p -- /usr/sbin/sshd -i'
        blocks = [
            f"Host {host.name}\n  User root\n  IdentityFile {ssh / 'id_ed25519'}\n  UserKnownHostsFile {ssh / 'known_hosts'}\n"
            f"  ProxyCommand {enter.format(pid=host.directory / 'pid')}\n"
            for host in self.hosts
        ]
        (self.directory / "ssh_config").write_text("\n".join(blocks))

    def ssh_config(self) -> Path:
        """For `ssh -F FILE node1` from outside."""
        for host in self.hosts:
            (host.directory / "pid").write_text(str(host.pid))
        return self.directory / "ssh_config"


def begin() -> tuple[Path, IO[str]]:
    """A new cluster's directory, and the open file whose lock says that its process lives. Sweeps first.

    One at a time: to another's sweep() a directory without its lock would look left behind, and two clusters that began at once
    have lost one its lock, and later, at the next sweep, all its files.
    """
    one = os.open(PARENT, os.O_RDONLY)
    try:
        fcntl.flock(one, fcntl.LOCK_EX)
        sweep()
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PARENT))
        directory.chmod(0o755)
        lock = (directory / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return directory, lock
    finally:
        os.close(one)


def sweep() -> None:
    """Remove what clusters left behind whose process is gone. Their hosts went with it; their directories did not."""
    for directory in PARENT.glob(f"{PREFIX}*"):
        try:
            with (directory / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # somebody's, and alive
        except OSError:
            pass
        shutil.rmtree(directory, ignore_errors=True)


def _key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", str(path)], check=True)
