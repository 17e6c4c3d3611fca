"""The far end of a question: one probe in a process of its own, which may crash or hang without harm to anything else.

Run as `python -m brigade.hosts.probe`; reads {"probe": "ROOM.probes.MODULE.FUNCTION", "arguments": {...}} as one line from
stdin, and writes its facts as one line of JSON. A probe that yields goes on afterwards until stdin is closed.
"""

import importlib
import inspect
import json
import os
import signal
import sys
from types import FunctionType


def find(name: str) -> FunctionType:
    """The function of a probe's name, "check.probes.storage.clock" for instance. Raises LookupError for what is none."""
    *modules, function = name.split(".")
    if not all(map(str.isidentifier, [*modules, function])) or function.startswith("_") or modules[1:2] != ["probes"]:
        raise LookupError(f"{name!r} is no probe")
    found = getattr(importlib.import_module(".".join(["brigade", *modules])), function, None)
    if not inspect.isfunction(found):
        raise LookupError(f"{name!r} is no probe")
    return found


def main() -> None:
    """Read the order from standard input, make its probes, and write each answer as a line of JSON."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what a probe made for a moment goes
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    order = json.loads(sys.stdin.readline())
    found = find(order["probe"])(**order["arguments"])
    if not inspect.isgenerator(found):
        print(json.dumps(found), file=answers, flush=True)
        return
    for facts in found:  # once
        print(json.dumps(facts), file=answers, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
