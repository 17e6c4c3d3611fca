"""1,000 hosts on one machine: `launch --dry-run`, `lint` and the hostfile's reader, whole commands, medians of five; and a
launch, once, on hosts of which testbed/stand_in/ssh takes the place and which say hello after half a second.

python -m benchmarks.large_clusters
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
HOSTS, TIMES = 1000, 5


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hosts"
        path.write_text("".join(f"node{number} slots=8\n" for number in range(1, HOSTS + 1)))
        reads = "from pathlib import Path; from brigade.train.recipe.hostfile import read_hostfile; read_hostfile(Path('{path}'))"
        launched = ["recipes/tiny/full.yaml", "--hostfile", str(path), "--global_batch_size", str(8 * HOSTS)]
        commands = {
            "launch --dry-run": ["-m", "brigade", "launch", *launched, "--dry-run"],
            "lint, whole repository": ["-m", "brigade", "lint"],
            f"lint, {HOSTS} hosts": ["-m", "brigade", "lint", str(path)],
            f"read_hostfile, {HOSTS} hosts": ["-c", reads.format(path=path)],
        }
        for name, words in commands.items():
            seconds = []
            for _ in range(TIMES):
                begun = time.monotonic()
                subprocess.run([sys.executable, *words], cwd=REPOSITORY, check=True, capture_output=True)
                seconds.append(time.monotonic() - begun)
            print(f"{name:28} {statistics.median(seconds):.2f} s (slowest {max(seconds):.2f} s)")
        launch(path, Path(folder) / "logs")


def launch(hostfile: Path, logs: Path) -> None:
    """Print how long a launch takes until all hosts have started, run and stopped, and what it needs for that."""
    there = {
        "PATH": f"{REPOSITORY / 'testbed' / 'stand_in'}:{os.environ['PATH']}",
        "STAND_IN_SLOTS": "8",
        "STAND_IN_LATENCY": "0.5",
    }
    words = [
        "-m",
        "brigade",
        "launch",
        "recipes/tiny/full.yaml",
        "--hostfile",
        str(hostfile),
        "--no_check",  # a stand-in has nothing that could be checked
        "--launcher",
        "torchrun",
        "--global_batch_size",
        str(8 * HOSTS),
        "--log_dir",
        str(logs),
    ]
    begun, most = time.monotonic(), 0
    with (logs.parent / "said").open("w+") as said:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=REPOSITORY, env=os.environ | there, stdout=said, stderr=said
        )
        while process.poll() is None:
            with suppress(OSError):
                most = max(most, sum(1 for _ in Path(f"/proc/{process.pid}/fd").iterdir()))
            time.sleep(0.05)
        seconds = time.monotonic() - begun
        said.seek(0)
        lines = said.read().splitlines()
    if process.returncode:
        raise RuntimeError("\n".join(lines[-10:]))
    print(f"launch, {HOSTS} hosts of 8 ranks  {seconds:.0f} s, {most:,} open files, {len(lines)} lines")


if __name__ == "__main__":
    main()
