"""A cluster of real hosts on one Linux machine, for tests, benchmarks and practice.

Each host is a set of namespaces (network, processes, mounts, host name, IPC) with a network card of its own, an sshd, its
own /tmp, /run and /dev/shm, and a home and the project's clone that all hosts share, as on a cluster with a network file
system. The switch between them lives in a namespace too, so no address of the machine itself is touched, and everything
ends with the process that built it.

    with Cluster(2) as cluster:
        cluster["node1"].run("ssh node2 hostname")
"""

from .cluster import Cluster
from .host import Host
from .needs import missing

__all__ = ["Cluster", "Host", "missing"]
