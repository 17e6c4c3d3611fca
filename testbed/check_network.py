"""Faults of the network's speed, which `python -m brigade check` has to find."""

from collections.abc import Callable
from functools import partial

from .cluster import Cluster
from .host import in_network
from .injected import Injected
from .strikes import OPENING

USUAL, TENTH = "500mbit", "50mbit"  # of a network that two cores can fill, and of the host that is slow on it


def even(cluster: Cluster) -> None:
    """All hosts have links of one known rate, which no processor here bounds."""
    for host in cluster:
        host.throttle(USUAL)


def uneven(cluster: Cluster) -> None:
    for host in cluster:
        host.throttle(None)


def one_slow(cluster: Cluster) -> None:
    even(cluster)
    cluster["node2"].throttle(TENTH)


def only_sends_slowly(cluster: Cluster) -> None:
    """What node2 receives comes as fast as on other hosts."""
    even(cluster)
    bucket = f"qdisc replace dev eth0 root tbf rate {TENTH} burst 64000 latency 50ms"
    in_network(cluster["node2"].pid, "tc", "-batch", "-", lines=bucket)


def slow_link(sender: str, *receivers: str) -> Callable[[Cluster], None]:
    """What `sender` sends to these hosts goes at a tenth; all else as usual: two buckets, and addresses choose one."""

    def arrange(cluster: Cluster) -> None:
        even(cluster)
        host = cluster[sender]
        lines = [
            "qdisc replace dev eth0 root handle 1: htb default 10",
            f"class replace dev eth0 parent 1: classid 1:10 htb rate {USUAL} burst 250k",
            f"class replace dev eth0 parent 1: classid 1:20 htb rate {TENTH} burst 64k",
        ]
        lines += [
            f"filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip dst {cluster[name].address}/32 flowid 1:20"
            for name in receivers
        ]
        in_network(host.pid, "tc", "-batch", "-", lines="\n".join(lines))

    return arrange


def takes_nothing(cluster: Cluster) -> None:
    """node2 takes no connection but ssh's, and makes its own as ever: it meets the others, and gloo hangs."""
    cluster["node2"].drop("input", f"tcp dport 1024-65535 {OPENING}")


_pairs = partial(Injected, check="pairs", size="usual", words="--only pairs")
INJECTED = [
    _pairs("tenth-of-bandwidth", "node2's link has 50 Mbit/s in both directions, those of the others 500", one_slow, "node2",
           says=r"it sends at 0\.0\d+ Gbit/s and receives at 0\.0\d+ Gbit/s", heal=uneven),
    _pairs("sends-slowly", "node2 sends at 50 Mbit/s and receives at 500, as the others do", only_sends_slowly, "node2",
           says=r"it sends at 0\.0\d+ Gbit/s; 0\.[345]\d+ are usual", heal=uneven),
    _pairs("slow-link", "node1 sends to node3 at 50 Mbit/s; all other pairs, and the way back, have 500",
           slow_link("node1", "node3"), "node1",
           says=r"it sends to node3 at 0\.0\d+ Gbit/s; node3 sends back at 0\.[345]\d+", heal=uneven),
    _pairs("takes-no-connections",
           "node2 drops what others open to its ports from 1024 up; its own connections work, so the ranks meet, and then hang",
           takes_nothing, "node2", says=r"it takes no connections from most hosts \(no answer within 3 s\)", heal=Cluster.heal),
]  # fmt: skip
