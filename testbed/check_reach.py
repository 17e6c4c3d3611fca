"""Faults of reach that `python -m brigade check` has to find: logins, names, interfaces, ports, packets."""

from collections.abc import Callable
from functools import partial

from . import strikes
from .cluster import Cluster
from .host import in_network
from .injected import Injected

ABOVE = "30000-65535"  # where a firewall that knows port 29500 alone is closed
OPENING = strikes.OPENING


def _off(cluster: Cluster) -> None:
    cluster["node2"].power_off()


def _hangs_at_login(cluster: Cluster) -> None:
    """As where a home directory's server does not answer."""
    keys = cluster["node2"].directory / "ssh" / "authorized_keys"
    keys.write_text('command="sleep 600" ' + (cluster.home / ".ssh" / "id_ed25519.pub").read_text())


def _logs_in(cluster: Cluster) -> None:
    strikes.right_key(cluster)
    cluster["node2"].kill("sleep 600")


def logs_in_by(line: str) -> Callable[[Cluster], None]:
    """node2's shells that ssh starts run a line before anything else: ~/.bashrc."""

    def arrange(cluster: Cluster) -> None:
        (cluster.home / ".bashrc").write_text(f'[ "$(hostname)" != node2 ] || {line}\n')

    return arrange


def logs_in_as_usual(cluster: Cluster) -> None:
    (cluster.home / ".bashrc").unlink()


def _named_with_user(cluster: Cluster) -> None:
    cluster.hostfile({"root@node2" if host.name == "node2" else host.name: 1 for host in cluster})


def _named(cluster: Cluster) -> None:
    cluster.hostfile(1)


def _names(name: str, address: str) -> Callable[[Cluster], None]:
    """node2's own /etc/hosts says that `name` is `address`."""

    def arrange(cluster: Cluster) -> None:
        lines = (cluster.directory / "etc_hosts").read_text().splitlines()
        kept = [line for line in lines if name not in line.split()]
        own = cluster["node2"].directory / "etc_hosts"
        own.write_text("\n".join([*kept, f"{address} {name}"]) + "\n")
        cluster["node2"].bind(own, "/etc/hosts")

    return arrange


def _right_names(cluster: Cluster) -> None:
    cluster["node2"].unbind("/etc/hosts")


def _drops(host: str, chain: str, packets: str) -> Callable[[Cluster], None]:
    """A host's firewall drops these packets; chain: "input" or "output"."""
    return lambda cluster: cluster[host].drop(chain, packets)


def _unblock(cluster: Cluster) -> None:
    for host in cluster:
        host.unblock()


def _one_direction(cluster: Cluster) -> None:
    cluster["node3"].block_from(cluster["node2"])


def _ip(words: str, cluster: Cluster) -> None:
    for line in words.split("; "):
        in_network(cluster["node2"].pid, "ip", *line.split())


def _other_interface(cluster: Cluster) -> None:
    """GLOO_SOCKET_IFNAME suits all hosts but one, whose card has another name."""
    cluster["node1"].environment(GLOO_SOCKET_IFNAME="eth0")
    _ip("link set eth0 down; link set eth0 name ens5; link set ens5 up", cluster)


def _same_interface(cluster: Cluster) -> None:
    cluster["node1"].environment()
    _ip("link set ens5 down; link set ens5 name eth0; link set eth0 up", cluster)


def _odd_entry(cluster: Cluster) -> None:
    """node2 knows node3 by another machine's card, as where two machines have one address."""
    _ip(f"neigh replace {cluster['node3'].address} lladdr 02:00:00:00:00:99 nud permanent dev eth0", cluster)


def _right_entry(cluster: Cluster) -> None:
    _ip(f"neigh del {cluster['node3'].address} dev eth0", cluster)


INJECTED = [
    Injected("powered-off", "a host is switched off", _off, "node2", "login", r"timed out|No route", Cluster.heal),
    Injected("link-cut", "a host's link is cut", strikes.cut_node2, "node2", "login", r"timed out|No route", Cluster.heal),
    Injected("wrong-key", "a host refuses the ssh key", strikes.other_key, "node2", "login", r"Permission denied",
             strikes.right_key),
    Injected("hangs-at-login", "a host lets us in and then says nothing", _hangs_at_login, "node2", "login",
             r"did not answer within \d+ s", _logs_in),
    Injected("exec-bash", "`exec bash` in a host's ~/.bashrc", logs_in_by("exec bash"), "node2", "login",
             r"a shell reads what is meant for the agent: bash", logs_in_as_usual),
    Injected("prints-our-lines", "a line of a host's ~/.bashrc prints `brigade> hello`", logs_in_by("echo 'brigade> hello'"),
             "node2", "login", r"prints a line that begins as the agent's do: 'brigade> hello'", logs_in_as_usual, "yellow"),
    Injected("long-packets-lost", "packets of more than 1,400 bytes are lost on the way to a host, so that ssh hangs",
             _drops("node2", "input", "ip length > 1400"), "node2", "login", r"long packets are lost on the way", _unblock),
    Injected("names-a-user", "the hostfile says root@node2", _named_with_user, "root@node2", "names",
             r"no name of a host has a user in it", _named, "yellow"),
    Injected("own-name-is-loopback", "a host's own name is 127.0.1.1, as Debian writes it", _names("node2", "127.0.1.1"), "node2",
             "interface", r"the loopback is taken: node2 is 127\.0\.1\.1", _right_names, "yellow"),
    Injected("name-is-loopback", "another host's name is the loopback", _names("node1", "127.0.0.1"), "node2", "names",
             r"node1 is 127\.0\.0\.1, the loopback", _right_names, "yellow"),
    Injected("name-is-unknown", "a host does not know another one's name", _names("node1", "# nobody is"), "node2", "names",
             r"node1 has no address", _right_names, "yellow"),
    Injected("port-taken", "another process has port 29500", strikes.occupy_port(29500), "node1", "ports",
             r"port 29500 is in use by process \d+ \(python3", strikes.free_port, "yellow"),
    Injected("port-blocked", "a firewall drops port 29500", _drops("node1", "input", "tcp dport 29500"), "node1", "ports",
             r"node2, node3 cannot reach it on port 29500: no answer", _unblock),
    Injected("firewall", "a firewall opens port 29500 alone", _drops("node2", "input", f"tcp dport {ABOVE} {OPENING}"), "node2",
             "ports", r"node1, node3 cannot reach it on \d+ of \d+ ports tried of \d+-\d+", _unblock),
    Injected("cannot-get-out", "a firewall drops what a host sends to high ports",
             _drops("node2", "output", f"tcp dport {ABOVE} {OPENING}"), "node2", "ports",
             r"it cannot reach node1, node3, which others reach", _unblock),
    Injected("one-direction", "what one host sends to another is dropped there", _one_direction, "node3", "ports",
             r"node2 cannot reach it on", _unblock),
    Injected("odd-arp-entry", "a host's ARP entry for another one is a third machine's card", _odd_entry, "node2", "addresses",
             r"it finds card 02:00:00:00:00:99 at node3's address", _right_entry, words="--only addresses"),
    Injected("small-mtu", "a host's card has MTU 1400", partial(_ip, "link set eth0 mtu 1400"), "node2", "packets",
             r"eth0 has MTU 1400, elsewhere it is 1500, and full-size packets are lost",
             partial(_ip, "link set eth0 mtu 1500"), "yellow"),
    Injected("lost-packets", "datagrams of more than 1,400 bytes are lost on the way to a host",
             _drops("node2", "input", "meta l4proto udp ip length > 1400"), "node2", "packets",
             r"packets of 1500 bytes from node1, node3 are lost, short ones arrive", _unblock, "yellow"),
    Injected("lossy-way", "30 of 100 datagrams are lost on the way to a host",
             _drops("node2", "input", "meta l4proto udp numgen random mod 100 < 30"), "node2", "ports",
             r"\d+% of short packets between it and node1, node3 are lost", _unblock, "yellow"),
    Injected("other-interface", "GLOO_SOCKET_IFNAME names a card that one host calls by another name", _other_interface, "node2",
             "interface", r"GLOO_SOCKET_IFNAME=eth0: no such interface .* ens5", _same_interface),
]  # fmt: skip
