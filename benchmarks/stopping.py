"""What it costs a step that all ranks agree whether to stop: microseconds of ranks.largest(), without any other work.

python -m benchmarks.stopping            # 2, 4 and 8 ranks of this host
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from brigade.train.distributed import ranks
from brigade.train.host.cluster import world_from_environment

TIMES = 2000


def main() -> None:
    from testing.ranks import run_ranks

    for size in (2, 4, 8):
        with tempfile.TemporaryDirectory() as folder:
            done = run_ranks("benchmarks.stopping", folder, ranks=size, timeout=120)
            assert done.returncode == 0, done.stderr
            taken = json.loads(Path(folder, "seconds.json").read_text())
        *_, most = statistics.quantiles(taken, n=100)
        print(f"{size} ranks: median {1e6 * statistics.median(taken):.0f} µs, 99th percentile {1e6 * most:.0f} µs")


def _work(folder: str) -> None:
    world = world_from_environment()
    ranks.start(world)
    taken = []
    for _ in range(TIMES):
        ranks.barrier()  # they come together, as after a step
        began = time.perf_counter()
        ranks.largest(0)
        taken.append(time.perf_counter() - began)
    if world.is_main_rank:
        Path(folder, "seconds.json").write_text(json.dumps(taken))
    ranks.finish()


if __name__ == "__main__":
    _work(sys.argv[1]) if "RANK" in os.environ else main()
