"""One host of a cluster: run things on it, and do to it what happens to hosts."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

PROJECT = Path(__file__).resolve().parent.parent
PORT = 22
# What sshd gives to a remote command, and no more.
BARE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IP_BATCH = ("ip", "-batch", "-")
Direction = Literal["in", "out"]


@dataclass(frozen=True)
class Site:
    """What the hosts of a cluster share.

    directory: everything of the cluster; home: everybody's; visible: paths of the machine that hosts see too
    in_switch: runs a command in the network of the switch, see in_network()
    """

    directory: Path
    home: Path
    visible: list[str]
    python: str
    in_switch: Callable[..., None]


class Host:
    """A host: name, address, and everything on it.

    path: the PATH that its shells see; without the environment's bin folder it is what a bare remote shell finds
    """

    def __init__(self, site: Site, number: int, name: str, path: str) -> None:
        self.site, self.number, self.name, self.path = site, number, name, path
        self.address = f"10.77.{number // 250}.{number % 250 + 1}"
        self.directory = site.directory / "hosts" / name
        self.variables: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.pid = 0  # of its first process, as the machine counts

    # ---- life and death ----------------------------------------------------------------------------------------
    def boot(self) -> None:
        """Start the host; it answers to ssh when this returns. Raises RuntimeError when it does not come up."""
        self._write_sshd_config()
        ready = self.directory / "ready"
        ready.unlink(missing_ok=True)
        spec = {
            "name": self.name,
            "home": str(self.site.home),
            "shared": self.site.visible,
            "ready": str(ready),
            "log": str(self.directory / "sshd.log"),
            "files": {
                "/etc/ssh": str(self.directory / "ssh"),
                "/etc/hosts": str(self.site.directory / "etc_hosts"),
                "/etc/resolv.conf": str(self.site.directory / "resolv.conf"),
                "/etc/hostname": str(self.directory / "hostname"),
            },
        }
        (self.directory / "spec.json").write_text(json.dumps(spec))
        # Each link of this chain dies with the one before it: nothing outlives the process that built the cluster.
        namespaces = "unshare --net --uts --mount --ipc --pid --fork --kill-child=KILL --mount-proc"
        init = [self.site.python, "-m", "testbed.init", str(self.directory / "spec.json")]
        command = ["setpriv", "--pdeathsig", "KILL", *namespaces.split(), *init]
        options: dict[str, Any] = {"cwd": PROJECT, "stdin": subprocess.DEVNULL, "start_new_session": True}
        with (self.directory / "boot.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, **options)
        self.pid = self._first_process()
        self._plug_in()
        deadline = time.monotonic() + 20
        while not ready.exists() or not self._ssh_answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not come up:\n{self._boot_log()}")
            time.sleep(0.02)

    def power_off(self) -> None:
        """Like pulling the plug: nothing more comes over the wire, not even a goodbye, and every process is gone."""
        if self.process is None:
            return
        self.cut()
        self.process.kill()
        self.process.wait()
        self.process, self.pid = None, 0
        # The kernel does it too, in its own time: it may have been first.
        self.site.in_switch(*IP_BATCH, lines=f"link del port{self.number}", check=False)

    def _first_process(self) -> int:
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and self.process.poll() is None:
            words = children.read_text().split()
            # setpriv and unshare replace themselves, so the child of this pid is the first process of the host.
            if words and namespace(words[0], "net") != namespace("self", "net"):
                return int(words[0])
            time.sleep(0.005)
        raise RuntimeError(f"{self.name} does not start:\n{self._boot_log()}")

    def _boot_log(self) -> str:
        return (self.directory / "boot.log").read_text()[-2000:]

    def _plug_in(self) -> None:
        plug, card = f"port{self.number}", f"02:77:00:00:{self.number // 250:02x}:{self.number % 250 + 1:02x}"
        self._switch(
            f"link add {plug} type veth peer name eth0 address {card} netns {self.pid}",
            f"link set {plug} master switch up",
        )
        lines = ("link set lo up", f"addr add {self.address}/16 dev eth0", "link set eth0 up")
        in_network(self.pid, *IP_BATCH, lines="\n".join(lines))

    def _switch(self, *lines: str) -> None:
        self.site.in_switch(*IP_BATCH, lines="\n".join(lines))

    def _ssh_answers(self) -> bool:
        command = ["nsenter", "-t", str(self.pid), "-n", "bash", "-c", f": < /dev/tcp/{self.address}/{PORT}"]
        return subprocess.run(command, capture_output=True).returncode == 0

    # ---- running things ----------------------------------------------------------------------------------------
    def command(self, words: str | Sequence[str], cwd: Path | str | None = None, **variables: str) -> list[str]:
        """The machine's command that runs `words` on this host with the few variables that a login has."""
        login = {
            "HOME": str(Path.home()),
            "USER": "root",
            "LOGNAME": "root",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "PATH": self.path,
        }
        pairs = [f"{key}={value}" for key, value in (login | self.variables | variables).items()]
        inner = ["bash", "-c", words] if isinstance(words, str) else list(words)
        enter = f"nsenter -t {self.pid} -n -u -m -i -p -- env -i -C"
        return [*enter.split(), str(cwd or PROJECT), *pairs, *inner]

    def run(
        self,
        words: str | Sequence[str],
        timeout: float = 60,
        check: bool = True,
        cwd: Path | str | None = None,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell line, or a list of words, on this host. Raises CalledProcessError unless check is False."""
        process = self.popen(words, cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **variables)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.send(process, signal.SIGKILL)
            out, err = process.communicate(timeout=10)
            raise TimeoutError(f"{words!r} on {self.name} took more than {timeout:.0f} s:\n{out}\n{err}") from None
        if check and process.returncode:
            raise RuntimeError(f"{words!r} on {self.name} ended with {process.returncode}:\n{out}\n{err}")
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def popen(
        self,
        words: str | Sequence[str],
        cwd: Path | str | None = None,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = False,
        **variables: str,
    ) -> subprocess.Popen[Any]:
        """Start a shell line, or a list of words, on this host."""
        return subprocess.Popen(
            self.command(words, cwd, **variables),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=text,
            start_new_session=True,
        )

    @staticmethod
    def send(process: subprocess.Popen[Any], number: int) -> None:
        """Send a signal to what popen() started (popen's own child only holds the door open)."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), number)

    def processes(self) -> dict[int, str]:
        """pid, as the machine counts, and command line of what runs on this host, its own init and sshd aside (a session
        of sshd whose other end was switched off waits for it long after the command in it has ended)."""
        if not self.pid:
            return {}
        mine = namespace(self.pid, "pid")
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or namespace(entry.name, "pid") != mine:
                    continue
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # gone meanwhile, or the machine's own
            if words and "testbed.init" not in words and not words.startswith(("/usr/sbin/sshd -D", "sshd: ")):
                found[int(entry.name)] = words
        return found

    def find(self, pattern: str) -> list[int]:
        """The processes of this host whose command line contains `pattern`, as the machine counts, oldest first.

        By their start: numbers begin again at 300 when the machine has given out its last.
        """
        return sorted((pid for pid, words in self.processes().items() if pattern in words), key=_started)

    def kill(self, pattern: str = "", number: int = signal.SIGKILL) -> int:
        """Send a signal to every process of this host whose command line contains `pattern`; returns how many."""
        pids = self.find(pattern)
        for pid in pids:
            with suppress(ProcessLookupError):  # its parent may have taken it along
                os.kill(pid, number)
        return len(pids)

    # ---- what happens to hosts -----------------------------------------------------------------------------------
    def throttle(self, rate: str | None) -> None:
        """Limit the host's network to `rate` ("200mbit") in each direction; None lifts the limit."""
        for run, device in ((partial(in_network, self.pid), "eth0"), (self.site.in_switch, f"port{self.number}")):
            if rate is None:
                run("tc", "qdisc", "del", "dev", device, "root", check=False)
                continue
            # A bucket holds what passes in 4 ms: less, and the kernel's clock cannot reach the rate.
            burst = max(64_000, int(bits_per_second(rate) / 8 * 0.004))
            words = f"qdisc replace dev {device} root tbf rate {rate} burst {burst} latency 50ms"
            run("tc", *words.split())

    def cut(self) -> None:
        """Cut the host's link: packets vanish, both ends learn nothing."""
        self._switch(f"link set port{self.number} nomaster")

    def restore(self) -> None:
        """Repair a link that was cut."""
        self._switch(f"link set port{self.number} master switch up")

    def block(self, port: int, direction: Direction = "in") -> None:
        """Drop TCP packets to `port`, coming in to this host or going out from it."""
        self.drop({"in": "input", "out": "output"}[direction], f"tcp dport {port}")

    def block_from(self, other: "Host") -> None:
        """Drop everything that comes from `other`: one direction of one link."""
        self.drop("input", f"ip saddr {other.address}")

    def unblock(self) -> None:
        """Lift every block."""
        in_network(self.pid, "nft", "-f", "-", lines="add table inet testbed\ndelete table inet testbed")

    def drop(self, chain: str, packets: str) -> None:
        """Drop what matches these words of nft; chain: "input" or "output"."""
        rules = f"""add table inet testbed
            add chain inet testbed {chain} {{ type filter hook {chain} priority 0; }}
            add rule inet testbed {chain} {packets} drop"""
        in_network(self.pid, "nft", "-f", "-", lines=rules)

    def bind(self, source: Path | str, target: Path | str) -> None:
        """Let this host alone see `source` where the others see `target`: another environment, another clone."""
        subprocess.run(["nsenter", "-t", str(self.pid), "-m", "mount", "--bind", str(source), str(target)], check=True)

    def unbind(self, target: Path | str) -> None:
        """Undo bind()."""
        # Among the host's processes: umount looks itself up in its /proc.
        subprocess.run(["nsenter", "-t", str(self.pid), "-m", "-p", "umount", str(target)], check=True)

    def environment(self, **variables: str) -> None:
        """What every later shell and ssh command on this host finds in its environment, besides PATH."""
        self.variables = variables
        self._write_sshd_config()
        os.kill(self._sshd(), signal.SIGHUP)
        deadline = time.monotonic() + 5
        time.sleep(0.1)  # sshd closes its port and opens it again
        while not self._ssh_answers() and time.monotonic() < deadline:
            time.sleep(0.02)

    def clock(self, offset: str | None) -> None:
        """Let commands on this host see another time: "+90s", "-2d"; None: the machine's. By libfaketime."""
        library = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)
        if offset and library is None:
            raise RuntimeError("no libfaketime: apt-get install --no-install-recommends faketime")
        self.environment(**({"LD_PRELOAD": str(library), "FAKETIME": offset} if offset else {}))

    def _sshd(self) -> int:
        mine = namespace(self.pid, "pid")
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for child in children:
            if namespace(child, "pid") == mine and b"sshd" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise RuntimeError(f"no sshd on {self.name}")

    def _write_sshd_config(self) -> None:
        variables = {"PATH": self.path} | self.variables
        pairs = " ".join(f'"{key}={value}"' for key, value in variables.items())
        (self.directory / "ssh" / "sshd_config").write_text(
            "HostKey /etc/ssh/host_key\nAuthorizedKeysFile /etc/ssh/authorized_keys\nPasswordAuthentication no\n"
            "PermitRootLogin yes\nStrictModes no\nUsePAM no\nUseDNS no\nMaxStartups 200\nMaxSessions 200\n"
            "PidFile none\nPrintMotd no\nSubsystem sftp internal-sftp\n"
            f"SetEnv {pairs}\n"
        )


def in_network(pid: int, *words: str, lines: str = "", check: bool = True) -> None:
    """Run a command in the network of a process, `lines` as its input. Raises RuntimeError unless check is False."""
    command = ["nsenter", "-t", str(pid), "-n", *words]
    done = subprocess.run(command, input=lines, text=True, capture_output=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {lines}: {done.stderr}")


def namespace(pid: int | str, kind: str) -> int:
    """The number of a process's namespace of that kind: "net", "pid", ..."""
    return Path(f"/proc/{pid}/ns/{kind}").stat().st_ino


def _started(pid: int) -> tuple[int, int]:
    """When a process began, in ticks since the machine did (proc(5): the 22nd field of stat), and its number; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]), pid
    except (FileNotFoundError, ProcessLookupError):
        return 0, pid


def bits_per_second(rate: str) -> float:
    """tc's notation: "200mbit", "1gbit", "50kbit"."""
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ValueError(f"{rate!r} is no rate: write for example 200mbit")
