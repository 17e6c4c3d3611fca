"""A Slurm of two hosts that fakes of its commands pretend, and a Python that pretends to train."""

import json
import subprocess
import sys
import time
from pathlib import Path

from .ranks import REPOSITORY

# Values of flags that shells, YAML and templates would take for something else.
NASTY = [
    "a b",
    "it's",
    'a "b"',
    "$HOME",
    "`id`",
    "$(id)",
    "a\nnum_nodes: 7\n#SBATCH --nodes=9",
    "ü ☕",
    "a;b&c|d",
    "*",
    "\\",
    "{{ slots }}",
]
# The step runs once per host, with that host's number, as srun does it. scancel reaches the ranks, as TERM to srun does not.
SRUN = """\
: >pids
while [ "${1#--}" != "$1" ]; do echo "srun $1" >>calls; shift; done
trap 'echo "srun got TERM" >>calls; kill -KILL $(cat pids); exit 137' TERM
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_NODEID=$node SLURM_PROCID=$node "$@" & echo $! >>pids
done
code=0; for pid in $(cat pids); do wait "$pid" || code=$?; done; exit $code
"""
SCONTROL = """\
echo "scontrol $*" >>calls
if [ "$1 $2" = "show hostnames" ]; then printf '%s\\n' node1 node2 node3 node4 | head -n "$SLURM_JOB_NUM_NODES"; fi
"""
SCANCEL = 'echo "scancel $*" >>calls; kill -TERM $(cat pids)'
PYTHON = f"""\
#!{sys.executable}
import json, os, pathlib, sys, time
if sys.argv[1:3] == ["-m", "brigade.train.run.starts"]:
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], os.environ | {{"PYTHONPATH": "{REPOSITORY}"}})
node, mode = os.environ["SLURM_NODEID"], pathlib.Path("mode").read_text()
pathlib.Path(f"started-{{node}}.tmp").write_text(json.dumps(sys.argv[1:]))
os.rename(f"started-{{node}}.tmp", f"started-{{node}}")
output = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
if mode == "hang":
    time.sleep(60)
if mode == "fail" and node == "1":
    sys.exit(3)
if node == "0" and mode != "end quietly":
    output.mkdir(parents=True, exist_ok=True)
if mode == "succeed" and node == "0":
    (output / "success.json").write_text("{{}}")
if mode.startswith("stopped by ") and node == "0":
    (output / "stopped.json").write_text(json.dumps({{"step": 4, "by": mode.removeprefix("stopped by ")}}, indent=2))
    sys.exit(0 if "file" in mode else 143)
"""


class Batch:
    """A job's directory, with fakes on its PATH."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name, script in {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
            self.program(directory / "bin" / name, "#!/bin/bash\n" + script)
        self.program(directory / ".venv/bin/python", PYTHON)
        for name in ("calls", "pids"):
            (directory / name).touch()

    def program(self, path: Path, script: str) -> None:
        """Write an executable file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
        path.chmod(0o755)

    def start(self, script: str, mode: str, **variables: str) -> subprocess.Popen[str]:
        """Start a job script. mode: what the ranks do (PYTHON); variables: of its environment"""
        (self.directory / "mode").write_text(mode)
        (self.directory / "job.sbatch").write_text(script)
        environment = {
            "PATH": f"{self.directory / 'bin'}:/usr/bin:/bin",
            "SLURM_SUBMIT_DIR": str(self.directory),
            "SLURM_JOB_ID": "41234",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NODEID": "0",
        }
        return subprocess.Popen(
            ["bash", self.directory / "job.sbatch"],
            env=environment | variables,
            cwd="/",
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, script: str, mode: str = "succeed", **variables: str) -> tuple[int, str]:
        """Run a job script to its end; returns its exit code and output."""
        process = self.start(script, mode, **variables)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def started(self) -> list[list[str]]:
        """Return the words that each host's Python was started with."""
        paths = sorted(self.directory.glob("started-*"))
        return [json.loads(path.read_text()) for path in paths]

    def wait_for(self, hosts: int) -> None:
        """Wait until so many hosts have started their ranks."""
        deadline = time.monotonic() + 30
        while len(list(self.directory.glob("started-?"))) < hosts:
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.02)

    @property
    def calls(self) -> list[str]:
        """The commands of Slurm that were called, and what they got."""
        return (self.directory / "calls").read_text().splitlines()
