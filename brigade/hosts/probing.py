"""An agent's questions to its own host: each probe of brigade/check/ in a process of its own, with a time limit."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from ..errors.tables import Fields
from ..train.distributed import visible
from . import Facts
from .host_facts import RUN

LINE = 2**20  # bytes of a message


def process_environment(handed_on: dict[str, str], run: str) -> dict[str, str]:
    """The variables of a process of the run on this host: with them it finds programs beside the interpreter, is found by the
    run's name, and uses the GPUs that were asked for, which DeepSpeed's launcher would replace (train/distributed/visible.py)."""
    beside = str(Path(sys.executable).parent)
    paths = [beside, *os.environ.get("PATH", os.defpath).split(":"), *handed_on.get("PATH", "").split(":")]
    ours = os.environ | handed_on | {RUN: run, "PATH": ":".join(dict.fromkeys(filter(None, paths)))}
    return ours | ({visible.ASKED: ours[visible.VISIBLE]} if visible.VISIBLE in ours else {})


def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a probe and what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class Probes:
    """run: the name by which every process of this agent is found; held: probes that go on until they are released"""

    def __init__(self) -> None:
        self.run = ""
        self.held: dict[str, asyncio.subprocess.Process] = {}

    async def do_probe(
        self,
        run: str,
        probe: str,
        arguments: Facts,
        environment: dict[str, str],
        seconds: float,
        hold: str = "",
    ) -> Facts:
        """Run one of brigade/check/probes/ in a process of its own. The answer is its facts, or why there are none.

        hold: a name under which it goes on afterwards, until do_release
        """
        self.run = run
        streams: Fields = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "brigade.hosts.probe"),
            env=process_environment(environment, run),
            start_new_session=True,
            limit=64 * LINE,
            **streams,
        )
        assert process.stdin and process.stdout and process.stderr
        errors = asyncio.ensure_future(process.stderr.read())
        line = b""
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(json.dumps({"probe": probe, "arguments": arguments}).encode() + b"\n")
                line = await process.stdout.readline()
                if line:
                    return {"facts": json.loads(line)}
                said = (await errors).decode(errors="replace").strip().splitlines()
                return {"problem": said[-1][:300] if said else f"it ended with {await process.wait()}"}
        except TimeoutError:
            return {"problem": f"no answer within {seconds:g} s"}
        except OSError as error:
            return {"problem": f"the probe ended at once: {error.strerror}"}
        finally:
            if hold and line:
                self.held[hold] = process
            else:
                _end(process)  # not awaited: one that hangs in a dead file system cannot be killed either

    async def do_release(self, hold: str) -> None:
        """Let a held probe end."""
        process = self.held.pop(hold, None)
        if process:
            assert process.stdin
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(10):  # on a slow file system its notes take their time to go
                    await process.wait()
            _end(process)
