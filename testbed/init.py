"""The first process of a host: gives it its name, its own files and an sshd, and adopts orphans. Runs inside its namespaces.

python -m testbed.init SPEC.json, with {name, home, shared: [path], files: {target: source}, log, ready}
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

# A host has these to itself; what of the machine must stay visible inside them is bound in again.
OWN = ("/tmp", "/run", "/dev/shm")


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def bind(source: str, target: str) -> None:
    """`source` seen at `target` too; a missing target is made (inside what the host has to itself)."""
    if Path(source).is_dir():
        Path(target).mkdir(parents=True, exist_ok=True)
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).touch()
    mount(
        "--no-canonicalize", "--bind", source, target
    )  # else mount looks where a door to a covered directory once led


def furnish(spec: dict) -> None:
    """The host's own view of the file system."""
    covered = [*OWN, str(Path.home())]
    kept = [path for path in spec["shared"] if any(Path(path).is_relative_to(cover) for cover in covered)]
    doors = {path: os.open(path, os.O_PATH) for path in kept}  # a way back to what is about to be covered
    for path in OWN:
        mount("-t", "tmpfs", "tmpfs", path)
    bind(spec["home"], str(Path.home()))
    for path, door in doors.items():
        bind(f"/proc/1/fd/{door}", path)
        os.close(door)
    Path("/run/sshd").mkdir(exist_ok=True)
    for target, source in spec["files"].items():
        bind(source, target)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    socket.sethostname(spec["name"])
    furnish(spec)
    with Path(spec["log"]).open("ab") as log:
        sshd = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    Path(spec["ready"]).write_text(str(sshd.pid))
    while True:  # only the kernel or `Host.power_off` ends this
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.2)


if __name__ == "__main__":
    main()
