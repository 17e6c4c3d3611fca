"""1,000 hosts on paper: `launch --dry-run`, `lint` and the hostfile's reader, whole commands, medians of five.

python -m benchmarks.large_clusters
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
HOSTS, TIMES = 1000, 5


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hosts"
        path.write_text("".join(f"node{number} slots=8\n" for number in range(1, HOSTS + 1)))
        reads = "from pathlib import Path; from brigade.cluster import read_hostfile; read_hostfile(Path('{path}'))"
        commands = {
            "launch --dry-run": ["-m", "brigade", "launch", "recipes/tiny/full.yaml", "--hostfile", str(path), "--dry-run",
                                 "--global_batch_size", str(8 * HOSTS)],
            "lint, whole repository": ["-m", "brigade", "lint"],
            f"lint, {HOSTS} hosts": ["-m", "brigade", "lint", str(path)],
            f"read_hostfile, {HOSTS} hosts": ["-c", reads.format(path=path)],
        }  # fmt: skip
        for name, words in commands.items():
            seconds = []
            for _ in range(TIMES):
                begun = time.monotonic()
                subprocess.run([sys.executable, *words], cwd=REPOSITORY, check=True, capture_output=True)
                seconds.append(time.monotonic() - begun)
            print(f"{name:28} {statistics.median(seconds):.2f} s (slowest {max(seconds):.2f} s)")


if __name__ == "__main__":
    main()
