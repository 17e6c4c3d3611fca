"""Names and interfaces, as one host sees them. Needs only the standard library.

Not from /sys/class/net: a container sees there the network of whoever mounted it. The kernel is asked by ioctl instead.
"""

import array
import fcntl
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from ...hosts import Facts
from ...hosts.host_facts import addresses

SIOCGIFHWADDR = 0x8927  # linux/sockios.h
SIOCGIFFLAGS, SIOCGIFMTU, SIOCETHTOOL, GET_DRIVER = 0x8913, 0x8921, 0x8946, 0x3  # linux/sockios.h, linux/ethtool.h
IFF_UP, IFF_LOOPBACK = 0x1, 0x8  # linux/if.h
ASKING = 0.5  # seconds that a neighbour may take to say who it is
RESOLVING = 6.0  # seconds: two DNS servers that do not answer
VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def look(names: list[str], towards: list[str]) -> Facts:
    """names: of all hosts; towards: addresses of the first host, of which one is the other end of this host's connections

    resolved: name -> addresses; unresolved: name -> why; interfaces: see interfaces(); leads: that towards the first host
    variables: of NCCL's and gloo's choice of interface; hostname, own: this host's name, and the addresses that it has here
    """
    resolved, unresolved = resolve([*names, socket.gethostname()])
    own = resolved.pop(socket.gethostname()) if socket.gethostname() not in names else resolved[socket.gethostname()]
    return {
        "resolved": resolved,
        "unresolved": {name: why for name, why in unresolved.items() if name in names},
        "interfaces": interfaces(),
        "leads": leads(towards),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "hostname": socket.gethostname(),
        "own": own,
    }


def resolve(names: list[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return (name -> its addresses, none where there are none; name -> why there are none)."""
    found: dict[str, list[str]] = {name: [] for name in names}
    why = dict.fromkeys(names, f"no answer within {RESOLVING:g} s")
    waiting = iter(list(found))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                name = next(waiting, None)
            if name is None:
                return
            try:
                known = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                found[name] = list(dict.fromkeys(str(entry[4][0]) for entry in known))
                why.pop(name, None)
            except OSError as error:
                why[name] = error.strerror or str(error)
            except UnicodeError:
                why[name] = "it is no name of a host"

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(32, len(found)))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + RESOLVING
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found), dict(why)


def interfaces() -> list[Facts]:
    """name, kind ("loopback", "bridge", or the driver's name), mtu, addresses of each interface that is up."""
    known = addresses()
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:

        def ask(request: int, name: str) -> int:
            answer = fcntl.ioctl(probe.fileno(), request, struct.pack("16si20x", name.encode()[:15], 0))
            return int(struct.unpack("16si20x", answer)[1])

        for _, name in socket.if_nameindex():
            with suppress(OSError):
                flags = ask(SIOCGIFFLAGS, name) & 0xFFFF
                if flags & IFF_UP:
                    kind = "loopback" if flags & IFF_LOOPBACK else driver(probe, name)
                    mine = [address for address, its in known.items() if its == name]
                    found.append({"name": name, "kind": kind, "mtu": ask(SIOCGIFMTU, name), "addresses": mine})
    return found


def driver(probe: socket.socket, name: str) -> str:
    """The driver of an interface: "bridge", "veth", "mlx5_core"; "" where it says none."""
    answer = array.array("B", struct.pack("I", GET_DRIVER) + bytes(192))  # struct ethtool_drvinfo
    with suppress(OSError):
        request = struct.pack("16sP16x", name.encode()[:15], answer.buffer_info()[0])
        fcntl.ioctl(probe.fileno(), SIOCETHTOOL, request)
    return answer.tobytes()[4:36].split(b"\0")[0].decode(errors="replace")


def leads(towards: list[str]) -> str:
    """The interface over which this host goes to one of these addresses, its own among them; "" where there is no way."""
    mine = addresses()
    for address in towards:
        if address in mine:
            return mine[address]
        with suppress(OSError), socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # of a datagram: nothing is sent
            source = str(probe.getsockname()[0])
            if source in mine:
                return mine[source]
    return ""


def neighbours(addresses: list[str]) -> Facts:
    """cards: hardware addresses of this host's interfaces; arp: IPv4 address -> the hardware address that answers for it here, of
    those asked for that are on a network of this host's own"""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for address in addresses:
            with suppress(OSError):
                probe.sendto(b"", (address, 9))  # nobody listens; the kernel asks who has the address
        cards = []
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFHWADDR, struct.pack("256s", name.encode()[:15]))
                cards.append(answer[18:24].hex(":"))
    deadline = time.monotonic() + ASKING
    while len(found := _arp(addresses)) < len(addresses) and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"cards": cards, "arp": found}


def _arp(addresses: list[str]) -> dict[str, str]:
    """Entries that are complete (ATF_COM) and of Ethernet (ARPHRD_ETHER), of these addresses: an IPoIB card has 20 bytes."""
    found = {}
    with suppress(OSError):
        for line in Path("/proc/net/arp").read_text().splitlines()[1:]:
            address, kind, flags, card, *_ = line.split()
            if address in addresses and int(kind, 16) == 1 and int(flags, 16) & 2:
                found[address] = card.lower()
    return found


def family_of(address: str) -> socket.AddressFamily:
    """The socket family of an IP address: IPv6 where it has a colon."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
