"""What it costs a step that all ranks agree whether to stop: microseconds of ranks.largest(), without any other work.

python -m benchmarks.stopping            # 2, 4 and 8 ranks of this host
"""

import statistics
import time

from brigade.train.distributed import ranks
from brigade.train.host.cluster import world_from_environment
from testing.on_ranks import on_ranks

TIMES = 2000


def main() -> None:
    for size in (2, 4, 8):
        taken = on_ranks(_seconds, ranks=size, timeout=120)[0]
        *_, most = statistics.quantiles(taken, n=100)
        print(f"{size} ranks: median {1e6 * statistics.median(taken):.0f} µs, 99th percentile {1e6 * most:.0f} µs")


def _seconds() -> list[float]:
    ranks.start(world_from_environment())
    taken = []
    for _ in range(TIMES):
        ranks.barrier()  # they come together, as after a step
        began = time.perf_counter()
        ranks.largest(0)
        taken.append(time.perf_counter() - began)
    return taken


if __name__ == "__main__":
    main()
