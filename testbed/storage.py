"""Faults of what is stored: disks, checkpoints, data. strikes.py has those of hosts and processes."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .cluster import PROJECT, Cluster
from .strikes import Attempt, signal_rank

SMALL = "/run/small"  # a disk of each host; node2's holds one checkpoint of the tiny recipe, and not two
TINY = "/run/tiny"  # a disk that fills at once, on one host
MOUNTED = "/run/outputs"  # a shared file system that each host has mounted, and can lose
FAILED_ONCE = "/run/failed-once"  # a file of each host, by which a rank knows that it has failed before


def tiny_disk(cluster: Cluster) -> None:
    cluster["node2"].run(f"mkdir -p {TINY} && mount -t tmpfs -o size=64k,mode=0700 tmpfs {TINY}")


def no_tiny_disk(cluster: Cluster) -> None:
    cluster["node2"].run(f"umount {TINY}")


def small_disks(cluster: Cluster) -> None:
    for host, size in (("node1", "300m"), ("node2", "45m")):
        cluster[host].run(f"mkdir -p {SMALL} && mount -t tmpfs -o size={size} tmpfs {SMALL}")


def read_only_disks(cluster: Cluster) -> None:
    for host in ("node1", "node2"):
        cluster[host].run(f"mkdir -p {SMALL} && mount -t tmpfs -o ro tmpfs {SMALL}")


def no_small_disks(cluster: Cluster) -> None:
    for host in ("node1", "node2"):
        cluster[host].run(f"umount {SMALL}")


def whole_on_small_disks(name: str) -> Callable[[Attempt], None]:
    """That node2 has this checkpoint alone, and every byte of it."""

    def after(attempt: Attempt) -> None:
        program = "import sys; from pathlib import Path; from brigade.train.checkpoint import manifest; "
        program += f"there = sorted(Path('{SMALL}/run').glob('checkpoint-*')); print([path.name for path in there], "
        program += "[manifest.flaw(path) or manifest.damage(path) for path in there])"
        found = attempt.cluster["node2"].run([sys.executable, "-c", program], cwd=PROJECT).stdout.strip()
        assert found == f"['{name}'] [None]", found

    return after


def mount_outputs(cluster: Cluster) -> None:
    (cluster.shared / "outputs").mkdir()
    for host in ("node1", "node2"):
        cluster[host].run(f"mkdir -p {MOUNTED}")
        cluster[host].bind(cluster.shared / "outputs", MOUNTED)


def unmount_on_node2(attempt: Attempt) -> None:
    attempt.cluster["node2"].run(f"umount -l {MOUNTED}")


def unmount_outputs(cluster: Cluster) -> None:
    cluster["node1"].unbind(MOUNTED)
    shutil.rmtree(cluster.shared / "outputs")


def nothing_on_node2_and_all_whole(attempt: Attempt) -> None:
    """The host that lost the directory made none of its own, and no checkpoint that lacks its part has a name."""
    assert attempt.cluster["node2"].run(f"ls -A {MOUNTED}").stdout == ""
    all_whole(attempt.cluster.shared / "outputs" / "run")


def kill_while_saving(attempt: Attempt) -> None:
    """Once a part of a checkpoint lies where it has no name yet."""
    saving = attempt.folder / "run" / ".saving"
    while not any(path.is_file() for path in saving.glob("checkpoint-*/*")):
        time.sleep(0.001)
    signal_rank(attempt)


def only_whole_checkpoints(attempt: Attempt) -> None:
    all_whole(attempt.folder / "run")


def all_whole(run: Path) -> None:
    from brigade.train.checkpoint import manifest

    there = sorted(run.glob("checkpoint-*"))
    wrong = {path.name: manifest.flaw(path) or manifest.damage(path) for path in there}
    assert there and not any(wrong.values()), wrong


def then_damage(damage: Callable[[Path], None]) -> Callable[[Attempt], None]:
    """A rank is killed; before the next attempt looks, the newest checkpoint's largest part is damaged. An older one is whole."""

    def strike(attempt: Attempt) -> None:
        signal_rank(attempt)
        attempt.wait_for("looking for hosts")
        newest = max((attempt.folder / "run").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        damage(max((path for path in newest.iterdir() if path.is_file()), key=lambda path: path.stat().st_size))

    return strike


def truncate(part: Path) -> None:
    os.truncate(part, part.stat().st_size // 2)


def flip_a_bit(part: Path) -> None:
    with part.open("r+b") as file:
        file.seek(part.stat().st_size // 2)
        there = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([there[0] ^ 1]))


def of_later_code(part: Path) -> None:
    """As if a later version of Brigade had written the checkpoint."""
    from brigade.train.checkpoint import manifest

    record = part.with_name(manifest.RECORD)
    record.write_text(record.read_text().replace(f'"format": {manifest.FORMAT}', '"format": 99'))


def come_back_without_output(attempt: Attempt) -> None:
    """As after a reboot: the rank is gone, and where the output was mounted is an empty directory."""
    signal_rank(attempt)
    attempt.wait_for("looking for hosts")
    attempt.cluster["node2"].run(f"mount -t tmpfs tmpfs {attempt.folder}/run")


def mount_output_again(cluster: Cluster) -> None:
    # Earlier faults of this cluster have directories there too, and nothing mounted.
    cluster["node2"].run(f"grep -o '{cluster.shared}/fault-[^ ]*/run' /proc/mounts | xargs umount")


def own_data(cluster: Cluster) -> None:
    """Files to train on that may be changed."""
    from brigade.train.data import builtin

    for name, source, count in (("train", builtin.TRAIN, 100), ("heldout", builtin.HELDOUT, 2)):
        lines = source.read_text().splitlines(keepends=True)[:count]
        (cluster.shared / f"{name}.jsonl").write_text("".join(lines))


def change_data(attempt: Attempt) -> None:
    signal_rank(attempt)
    attempt.wait_for("looking for hosts")
    with (attempt.cluster.shared / "train.jsonl").open("r+") as file:
        lines = file.readlines()[:-1]
        file.seek(0)
        file.truncate()
        file.writelines(lines)


def forget_the_fault(cluster: Cluster) -> None:
    for host in (host for host in cluster if host.process):  # one may be off
        host.run(f"rm -f {FAILED_ONCE}")


def only_node2_fails(cluster: Cluster) -> None:
    """Once, whichever host a later attempt gives its rank to."""
    forget_the_fault(cluster)
    for host in cluster:
        host.run(f"test {host.name} = node2 || touch {FAILED_ONCE}")
