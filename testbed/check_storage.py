"""Faults of disks and clocks that `python -m brigade check` has to find."""

import shutil

from . import strikes
from .cluster import Cluster
from .injected import Injected
from .storage import own_data

PRIVATE = "/run/check"  # a directory of each host's own


def _small(size: str, host: str = "node2") -> "_Mounted":
    return _Mounted(host, f"tmpfs -o size={size} tmpfs")


class _Mounted:
    """A disk on one host's PRIVATE."""

    def __init__(self, host: str, what: str) -> None:
        self.host, self.what = host, what

    def arrange(self, cluster: Cluster) -> None:
        cluster[self.host].run(f"mkdir -p {PRIVATE} && mount -t {self.what} {PRIVATE}")

    def heal(self, cluster: Cluster) -> None:
        cluster[self.host].run(f"umount {PRIVATE} && rmdir {PRIVATE}")


def _shared_but_on_one(cluster: Cluster) -> None:
    """The directory that all hosts share, hidden on node3 by a disk of its own."""
    (cluster.shared / "output").mkdir(exist_ok=True)
    cluster["node3"].run(f"mount -t tmpfs tmpfs {cluster.shared}/output")


def _shared_again(cluster: Cluster) -> None:
    cluster["node3"].run(f"umount {cluster.shared}/output")
    (cluster.shared / "output").rmdir()


def _without_data(cluster: Cluster) -> None:
    """Files to train on in a directory that all hosts share, and that a disk of node3's own hides from it."""
    own_data(cluster)
    (cluster.shared / "data").mkdir(exist_ok=True)
    for name in ("train", "heldout"):
        (cluster.shared / f"{name}.jsonl").rename(cluster.shared / "data" / f"{name}.jsonl")
    cluster["node3"].run(f"mount -t tmpfs tmpfs {cluster.shared}/data")


def _with_data(cluster: Cluster) -> None:
    cluster["node3"].run(f"umount {cluster.shared}/data")
    shutil.rmtree(cluster.shared / "data")


ZERO = "--ds_config ds_configs/zero3.json"
_FULL, _READ_ONLY = _small("20m"), _Mounted("node3", "tmpfs -o ro tmpfs")
INJECTED = [
    Injected("clock", "a clock is a minute late", lambda cluster: cluster["node2"].clock("-61s"), "node2", "clock",
             r"its clock is (5[5-9]|6\d)\.\d s behind", strikes.right_clock),
    Injected("not-shared", "one host's output directory is its own disk, under ZeRO-3", _shared_but_on_one, "node3",
             "output directory", r"output/run is not what node1 sees there", _shared_again,
             words=f"{ZERO} --output_dir SHARED/output/run"),
    Injected("disk-nearly-full", "the output's disk has no room for two checkpoints", _FULL.arrange, "node2", "room",
             r"GiB free; a checkpoint of this recipe takes", _FULL.heal, words=f"--output_dir {PRIVATE}/run"),
    Injected("missing-data", "a file to train on is missing", _without_data, "node3", "paths", r"data/train\.jsonl", _with_data,
             words="--train_file SHARED/data/train.jsonl --validation_file SHARED/data/heldout.jsonl --dataset_name null"),
    Injected("read-only", "the output's disk is read-only", _READ_ONLY.arrange, "node3", "output directory",
             r"Read-only file system", _READ_ONLY.heal, words=f"--output_dir {PRIVATE}/run"),
]  # fmt: skip
