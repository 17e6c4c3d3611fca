"""The process that watches over a rank of `launch`: it hands on what the rank writes, and says how it ended."""

import json
import os
import select
import signal
import socket
from contextlib import suppress
from typing import NoReturn

from .observer import LOOK, Observer


def watch(child: int, agent: socket.socket, out: int, notes: int, wake: int) -> NoReturn:
    """Hand on what the child writes until it ends, and when it falls silent; end as it ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda received, _: os.kill(child, received))
    rank = int(os.environ["RANK"])
    pending = {out: b"", notes: b""}  # the beginning of a line whose end is still to come
    observer, silent = Observer(child), False
    done = False  # the rank has said that its work is done

    def send(**what: object) -> None:
        with suppress(OSError):  # its end is noticed by poll
            agent.sendall(json.dumps({"rank": rank, **what}).encode() + b"\n")

    def hand_on(source: int) -> bool:
        """Send the whole lines that are there; False at the end of the source."""
        nonlocal done
        chunk = os.read(source, 65536)
        *lines, pending[source] = (pending[source] + chunk).split(b"\n")
        if source == notes:
            for said in map(json.loads, lines):
                done |= said.pop("done", False)
                if said:
                    send(**said)
            return bool(chunk)
        lines = [line.rpartition(b"\r")[2] for line in lines]  # of a progress bar its last state
        if b"\r" in pending[out] or len(pending[out]) > 65536:  # a bar that goes on, or output without lines
            lines.append(pending[out].rstrip(b"\r").rpartition(b"\r")[2])
            pending[out] = b""
        if lines:
            send(out=b"\n".join(lines).decode(errors="replace"))
        return bool(chunk)

    send(pid=child)
    os.set_blocking(out, False)
    poll = select.poll()
    for source in (out, notes, wake, agent.fileno()):
        poll.register(source, select.POLLIN)
    ended = status = 0
    while not ended:
        for source, _ in poll.poll(1000 * LOOK):
            if source == wake:
                os.read(wake, 512)
                ended, status = os.waitpid(child, os.WNOHANG)
            elif source == agent.fileno():  # it never writes: this is its end
                os.kill(child, signal.SIGKILL)
                ended, status = os.waitpid(child, 0)
            elif not hand_on(source):
                poll.unregister(source)
        if observer.look() != silent:  # launch hears of silences that are too long, and of their ends
            silent = not silent
            send(silent=observer.seen() if silent else None)
    os.set_blocking(notes, False)
    for source in (out, notes):
        with suppress(BlockingIOError):
            while hand_on(source):
                pass
    if pending[out]:
        send(out=pending[out].decode(errors="replace"))
    code = os.waitstatus_to_exitcode(status)
    # Whoever calls sys.exit(0) or os._exit(0) in the middle of a run ends it without a word.
    send(exit=code, within=observer.seen()["step"], **({} if code or done else {"left": observer.seen()}))
    agent.close()
    if code < 0:  # so that the launcher sees a signal too
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
