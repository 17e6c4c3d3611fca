"""What it costs that prepared data is compared with its checksums: opening a store and reading samples in random order, with the
comparison and without, side by side.

    python -m benchmarks.prepared_cache [--gigabytes 10]

Prints medians of five, taken in turn, and their ratio. It needs as much room on the disk of TMPDIR, and as much memory where the
figures shall be of the comparison and not of the disk.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

from brigade.train.data import stored_files
from brigade.train.data.store import Samples
from brigade.train.host import cache

LENGTH = 1000  # tokens of a sample
READ = 20_000  # samples that are read
TIMES = 5


def write(folder: Path, gigabytes: float) -> None:
    """Write a store with so many bytes of tokens."""
    samples = int(gigabytes * 1e9 / 4 / LENGTH)
    part = np.random.default_rng(0).integers(0, 100_000, 1000 * LENGTH, np.int32)
    with (folder / "tokens").open("wb") as tokens, (folder / "supervised").open("wb") as supervised:
        for first in range(0, samples, 1000):
            chosen = part[: min(1000, samples - first) * LENGTH]
            chosen.tofile(tokens)
            (chosen % 2 == 0).tofile(supervised)
    np.save(folder / "begins.npy", np.arange(samples + 1) * LENGTH)
    np.save(folder / "counts.npy", np.full(samples, LENGTH // 2))
    np.save(folder / "train.rows.npy", np.arange(samples + 1))
    np.save(folder / "train.samples.npy", np.arange(samples))


def unchecked() -> mock._patch:
    """Read the same files without a look at their checksums."""
    return mock.patch.object(stored_files.Manifest, "check", lambda *_: None)


def opened(folder: Path) -> Samples:
    """Open a store as a run does: the look before preparing, and the samples."""
    assert not cache.flaw(folder)
    return Samples(folder, "train")


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=10.0)
    size = parser.parse_args().gigabytes
    with tempfile.TemporaryDirectory() as home:
        os.environ["BRIGADE_CACHE"] = home
        written: list[float] = []

        def build(aside: Path) -> None:
            written.append(seconds(lambda: write(aside, size)))

        whole: list[float] = []
        folder = cache.cache_directory("prepared") / "store"
        whole.append(seconds(lambda: cache.once(folder, build)) - written[0])
        os.utime(folder / "tokens")
        again = seconds(lambda: cache.flaw(folder))
        taken: dict[str, list[float]] = {}
        order = np.random.default_rng(1).permutation(len(Samples(folder, "train")))[:READ].tolist()

        def read(samples: Samples) -> None:
            for number in order:
                samples[number]

        for _ in range(TIMES):
            taken.setdefault("open", []).append(seconds(lambda: opened(folder)))
            with unchecked():
                taken.setdefault("open, unchecked", []).append(seconds(lambda: Samples(folder, "train")))
            samples = Samples(folder, "train")
            taken.setdefault("read", []).append(seconds(lambda: read(samples)))  # noqa: B023
            taken.setdefault("read again", []).append(seconds(lambda: read(samples)))  # noqa: B023
            with unchecked():
                plain = Samples(folder, "train")
                taken.setdefault("read, unchecked", []).append(seconds(lambda: read(plain)))  # noqa: B023
        median = {name: statistics.median(times) for name, times in taken.items()}
        print(
            f"{size:g} GB of tokens, {len(order):,} samples of {LENGTH} tokens, {os.cpu_count()} cores, medians of {TIMES}"
        )
        print(f"writing checksums: {whole[0]:.1f} s, once; reading all of a copy: {again:.1f} s, once")
        print(f"opening: {median['open'] * 1e3:.1f} ms, without comparing {median['open, unchecked'] * 1e3:.1f} ms")
        per_sample = {name: median[name] / len(order) * 1e6 for name in ("read", "read again", "read, unchecked")}
        for name in ("read", "read again"):
            ratio = per_sample[name] / per_sample["read, unchecked"]
            print(
                f"{name}: {per_sample[name]:.1f} us a sample, {ratio:.2f} of {per_sample['read, unchecked']:.1f} us without"
            )


if __name__ == "__main__":
    main()
