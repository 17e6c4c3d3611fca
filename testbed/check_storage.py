"""Faults of storage and clocks that `python -m brigade check` has to find."""

from . import strikes
from .cluster import Cluster
from .injected import Injected

DATA = "/run/data/train.jsonl"  # of each host its own
SMALL = "/run/small"
OWN = "/run/own"  # what a host sees in place of the shared output directory
_READS = f"--dataset_name null --train_file {DATA}"


def _write(cluster: Cluster, host: str, rows: int) -> None:
    line = '{"prompt": "a", "completion": "b"}'
    cluster[host].run(f"mkdir -p /run/data && yes '{line}' | head -n {rows} > {DATA}")


def _data_on_two(cluster: Cluster) -> None:
    for host in ("node1", "node3"):
        _write(cluster, host, 100)


def _less_data_on_one(cluster: Cluster) -> None:
    _data_on_two(cluster)
    _write(cluster, "node2", 99)


def _no_data(cluster: Cluster) -> None:
    for host in cluster:
        host.run("rm -rf /run/data")


def _not_shared(cluster: Cluster) -> None:
    (cluster.shared / "preflight").mkdir(exist_ok=True)
    cluster["node2"].run(f"mkdir -p {OWN}")
    cluster["node2"].bind(OWN, cluster.shared / "preflight")


def _shared(cluster: Cluster) -> None:
    cluster["node2"].unbind(cluster.shared / "preflight")
    (cluster.shared / "preflight").rmdir()  # fails where a check has left something


def _small_disk(cluster: Cluster) -> None:
    for host in cluster:
        size = "20m" if host.name == "node2" else "500m"
        host.run(f"mkdir -p {SMALL} && mount -t tmpfs -o size={size} tmpfs {SMALL}")


def _read_only(cluster: Cluster) -> None:
    for host in cluster:
        mode = "ro" if host.name == "node2" else "size=500m"
        host.run(f"mkdir -p {SMALL} && mount -t tmpfs -o {mode} tmpfs {SMALL}")


def _no_disks(cluster: Cluster) -> None:
    for host in cluster:
        host.run(f"rmdir {SMALL} 2>/dev/null; umount {SMALL} && rmdir {SMALL}")


def _full_cache(cluster: Cluster) -> None:
    cluster["node2"].run(f"mkdir -p {SMALL} && mount -t tmpfs -o size=64k tmpfs {SMALL}")
    cluster["node2"].environment(BRIGADE_CACHE=SMALL)


def _own_cache(cluster: Cluster) -> None:
    cluster["node2"].environment()
    cluster["node2"].run(f"umount {SMALL} && rmdir {SMALL}")


def _minute_ahead(cluster: Cluster) -> None:
    cluster["node2"].clock("+60s")


def _seconds_behind(cluster: Cluster) -> None:
    cluster["node2"].clock("-4s")


_WHOLE = f"--ds_config none --output_dir {SMALL}/run"
INJECTED = [
    Injected("clock", "a host's clock is a minute ahead", _minute_ahead, "node2", "clock", r"its clock is \d+\.\d s ahead",
             strikes.right_clock),
    Injected("clock-4s", "a host's clock is four seconds behind", _seconds_behind, "node2", "clock",
             r"its clock is \d\.\d s behind", strikes.right_clock, "yellow"),
    Injected("data-missing", "a host lacks a data file", _data_on_two, "node2", "data", rf"{DATA} is not there", _no_data,
             words=_READS),
    Injected("data-differs", "a host has another data file of the same name", _less_data_on_one, "node2", "data",
             rf"{DATA} has [\d,]+ bytes in 1 file, elsewhere [\d,]+", _no_data, words=_READS),
    Injected("not-shared", "a host sees a directory of its own in place of the shared output", _not_shared, "node2", "output",
             r"it does not see what node1 writes to", _shared),
    Injected("read-only", "a host's output directory is read-only", _read_only, "node2", "output",
             rf"{SMALL}: Read-only file system", _no_disks, words=_WHOLE),
    Injected("disk-nearly-full", "a host's disk has no room for one checkpoint", _small_disk, "node2", "room",
             rf"{SMALL} has 2\d MB free, and one checkpoint takes \d+ MB", _no_disks, words=_WHOLE),
    Injected("cache-full", "a host's cache directory lies on a full disk", _full_cache, "node2", "room",
             rf"{SMALL}, the cache, has 0 MB free", _own_cache),
]  # fmt: skip
