"""Clusters of the testbed that begin at the same time do not take each other for left behind."""

import shutil
import threading
import time

from testbed import cluster


def test_a_cluster_that_is_just_beginning_is_not_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "PARENT", tmp_path)
    left = tmp_path / f"{cluster.PREFIX}of-a-process-that-is-gone"
    left.mkdir()
    make, made, begun = cluster.tempfile.mkdtemp, threading.Event(), []

    def slowly(**options):
        directory = make(**options)
        made.set()
        time.sleep(0.3)  # there, and not locked yet
        return directory

    monkeypatch.setattr(cluster.tempfile, "mkdtemp", slowly)
    first = threading.Thread(target=lambda: begun.append(cluster.begin()))
    first.start()
    assert made.wait(10)
    begun.append(cluster.begin())
    first.join()
    cluster.sweep()
    assert len(begun) == 2 and all((directory / "lock").exists() for directory, _ in begun) and not left.exists()
    for directory, lock in begun:
        lock.close()
        shutil.rmtree(directory)
