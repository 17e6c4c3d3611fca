"""python -m testbed up 4: hosts to try things on, until `python -m testbed down`."""

import argparse
import json
import os
import signal
import socket
import sys
import time

from .cluster import PARENT, PREFIX, Cluster
from .needs import require

DOOR = "door"  # the socket of a cluster, in its directory
FAULTS = ("throttle", "cut", "restore", "block", "unblock", "power_off", "boot", "clock", "kill")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="build a cluster and leave it running")
    up.add_argument("count", type=int, nargs="?", default=2, help="number of hosts (default: 2)")
    verbs.add_parser("down", help="take it down")
    do = verbs.add_parser("do", help="do to a host what happens to hosts, e.g. `do node2 throttle 200mbit`")
    do.add_argument("host")
    do.add_argument("what", choices=FAULTS)
    do.add_argument("value", nargs="*", help="a rate for throttle, a port for block, an offset for clock")
    options = parser.parse_args()
    require()
    if options.verb == "up":
        return _up(options.count)
    try:
        answer = _ask([options.verb] if options.verb == "down" else ["do", options.host, options.what, *options.value])
    except OSError:
        print("no cluster is up: start one with `python -m testbed up 4`", file=sys.stderr)
        return 2
    print(answer)
    return int(answer.startswith("error"))


def _up(count: int) -> int:
    if count < 1 or count > 250:
        print(f"{count} hosts: from 1 to 250 can be built", file=sys.stderr)
        return 2
    try:
        print(f"a cluster is up already: {_ask(['where'])} (`python -m testbed down` takes it down)", file=sys.stderr)
        return 2
    except OSError:
        pass
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        with os.fdopen(read) as pipe:
            said = pipe.read()
        print(said, end="")
        return 0 if said.startswith("up") else 1
    os.setsid()
    os.close(read)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with os.fdopen(write, "w") as pipe:
        try:
            cluster = Cluster(count).__enter__()
        except RuntimeError as error:
            print(f"error: {error}", file=pipe)
            return 1
        names = " ".join(host.name for host in cluster)
        print(
            f"up: {names}\n  ssh -F {cluster.ssh_config()} node1\n  hostfile for them: {cluster.hostfile(1)}\n"
            "  python -m testbed do node2 throttle 200mbit\n  python -m testbed down",
            file=pipe,
        )
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    try:
        _serve(cluster)
    finally:
        cluster.down()
    return 0


def _serve(cluster: Cluster) -> None:
    """Do what is asked through the door until somebody asks for the end."""
    with socket.socket(socket.AF_UNIX) as server:
        usual = os.umask(0o077)
        server.bind(str(cluster.directory / DOOR))
        os.umask(usual)
        server.listen()
        while True:
            client, _ = server.accept()
            with client, client.makefile("rw") as stream:
                words = json.loads(stream.readline())
                print(json.dumps(_answer(cluster, words)), file=stream)
            if words == ["down"]:
                return


def _answer(cluster: Cluster, words: list[str]) -> str:
    if words[0] == "where":
        return str(cluster.directory)
    if words[0] == "down":
        return "down"
    _, name, what, *values = words
    try:
        host = cluster[name]
        getattr(host, what)(*(int(value) if what == "block" and value.isdigit() else value for value in values))
        cluster.ssh_config()  # a host that booted has a new first process
    except Exception as error:  # the person at the other end reads it
        return f"error: {what} {name}: {error or type(error).__name__}"
    return f"{what} {name}: done"


def _ask(words: list[str]) -> str:
    """Raises OSError where no cluster is up. Only in a directory of our own: anybody may make one of that name there."""
    doors = (path for path in PARENT.glob(f"{PREFIX}*/{DOOR}") if path.parent.lstat().st_uid == os.geteuid())
    door = next(doors, PARENT / "no cluster")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(door))
        with client.makefile("rw") as stream:
            print(json.dumps(words), file=stream, flush=True)
            answer = json.loads(stream.readline())
    if words == ["down"]:
        while door.parent.exists():
            time.sleep(0.02)
    return answer


if __name__ == "__main__":
    raise SystemExit(main())
