"""Ranks of one host, which no other user of that host can join.

Torch's store listens on all interfaces and does not ask who connects, and what libraries exchange over a process group are
pickles: whoever takes a rank's place runs code as this user. Hence, where all ranks are on one host:

- They meet in a file without a name, in rank 0's memory (memfd), which only processes of this user can open. Where it is comes
  over the launcher's store. Whoever forges that can stop the run, but each rank checks whose file it has opened.
- Gloo listens on the loopback.
- Gloo takes whoever connects first for the peer. So each new group is looked at before it is used: the kernel knows which user
  has the other end of each connection.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ...errors import UserError
from ..host import processes
from ..upstream import gloo
from .process import this_process

NAME = "brigade-store"
LOOPBACK = re.compile(r"localhost|127\.[\d.]+|::1")
ESTABLISHED, LISTENING = "01", "0A"  # net/tcp_states.h
LOOKS = 3  # at a table that changes while it is read


class Connection(NamedTuple):
    """A row of /proc/net/tcp. local, remote: address and port, in the kernel's hexadecimal words"""

    local: str
    remote: str
    state: str
    user: int
    inode: str


def has_all_ranks(env: Mapping[str, str]) -> bool:
    """Whether this host has all ranks of the run, by what the launcher wrote. Without a launcher nobody says how many ranks a
    host has, and the address of rank 0 has to."""
    size = env["WORLD_SIZE"]
    here = env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE")
    return here == size if here else bool(LOOPBACK.fullmatch(env.get("MASTER_ADDR", "")))


def first_meeting(env: Mapping[str, str], timeout: timedelta) -> dist.Store | None:
    """The store of rank 0, which tells the others where to meet, on the loopback where the address allows it. None: another
    process has it. Raise OSError for a port that is in use."""
    address, agents = env.get("MASTER_ADDR", ""), env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if env["RANK"] != "0" or agents or not LOOPBACK.fullmatch(address):
        return None
    family, kind, _, _, place = socket.getaddrinfo(address, int(env["MASTER_PORT"]), type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(place)
    listening.listen(int(env["WORLD_SIZE"]) + 128)
    size, port = int(env["WORLD_SIZE"]), place[1]
    return dist.TCPStore(
        address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The store of this run's ranks, once all are here. store: the launcher's, which nobody needs afterwards

    Raise RuntimeError where it leads to what is not this run's, or not all come within `timeout`."""
    key = f"brigade/place-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}-{this_process.turn('join')}"
    if rank == 0:
        file = os.memfd_create(NAME)
        os.fchmod(file, 0o600)
        store.set(key, f"{os.getpid()} {file}")
        process = os.getpid()
    else:
        process, file = _open(store.get(key).decode(errors="replace"))
    this_process.rank_0 = process, _began(process)
    private = dist.FileStore(f"/proc/self/fd/{file}", size)
    private.set_timeout(timeout)
    if private.add("brigade/here", 1) == size:
        private.set("brigade/all-here", "1")
    try:
        private.wait(["brigade/all-here"], timeout)
    except RuntimeError:
        came = private.add("brigade/here", 0)
        raise RuntimeError(f"{came} of {size} ranks came within {timeout}") from None
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gloo.around_each_group(nobody_else)
    return private


def rank_0_is_gone() -> bool:
    """Whether rank 0 was killed, and with it whatever it had to say. Its store outlives it."""
    return this_process.rank_0 is not None and _began(this_process.rank_0[0]) != this_process.rank_0[1]


@contextmanager
def nobody_else() -> Iterator[None]:
    """Make a group of ranks inside, whose connections come only from this user, or root. Where there are several hosts, and
    where the kernel does not list its connections, it looks at nothing.

    Raise UserError that names another user."""
    before = _own_sockets()
    yield
    users = strangers(before) if this_process.rank_0 is not None else []
    if users:
        problem = f"{' and '.join(users)} connected to this run's ranks while they found each other"
        cure = "the same command again goes on; if it comes back, speak with them, or train on a host of your own"
        raise UserError(f"the ranks on {socket.gethostname()}", problem, cure, "passing")


def strangers(before: set[str]) -> list[str]:
    """The other users who have connected to sockets on which this process listens, apart from connections in `before`."""
    foreign: set[str] = set()
    for _ in range(LOOKS):
        table = _table()
        mine = _own_sockets()
        user_of = {(row.local, row.remote): row.user for row in table}
        doors = {_port(row.local) for row in table if row.state == LISTENING and row.inode in mine}
        came = [row for row in table if row.state == ESTABLISHED and row.inode in mine - before]
        users = {user_of.get((row.remote, row.local)) for row in came if _port(row.local) in doors}
        foreign = {_name(user) for user in users - {os.geteuid(), 0}}
        if None not in users:  # else its other end may have been left out
            break
    return sorted(foreign)


def _open(place: str) -> tuple[int, int]:
    """(process of rank 0, its file). Raise RuntimeError for a file that is no store of this user."""
    with suppress(OSError, ValueError):
        process, number = map(int, place.split())
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        name = str(Path(f"/proc/self/fd/{file}").readlink())
        if os.fstat(file).st_uid == os.geteuid() and name.startswith(f"/memfd:{NAME} "):
            return process, file
        os.close(file)
    raise RuntimeError("what answers there is no rank 0 of this user on this host")


def _began(process: int) -> str:
    """When a process began, in ticks since this host did; "" for one that has ended."""
    words = processes.status(process)
    return words[19] if words and words[0] not in "ZX" else ""


def _own_sockets() -> set[str]:
    links = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the directory's own, for one
            links.add(str(entry.readlink()))
    return {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}


def _table() -> list[Connection]:
    rows = []
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(name).read_text().splitlines()[1:]:
                words = line.split()
                rows.append(Connection(_plain(words[1]), _plain(words[2]), words[3], int(words[7]), words[9]))
    return rows


def _plain(address: str) -> str:
    """An IPv4 address that an IPv6 socket has, as the other end writes it."""
    return re.sub("^0{16}FFFF0000", "", address)


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _name(user: int | None) -> str:
    if user is None:
        return "somebody on another host"
    with suppress(KeyError):
        return f"user {pwd.getpwuid(user).pw_name}"
    return f"user {user}"
