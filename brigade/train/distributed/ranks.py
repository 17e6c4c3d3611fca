"""All ranks as one program: the process group, agreement before the model is built, and one message per error.

A launcher kills the other ranks as soon as one leaves, so a message that the wrong rank prints a second later is lost
(seen under torchrun, accelerate and deepspeed). Hence: before the model is built every rank takes part in one
exchange of errors, the first that has one prints it, and the others leave only afterwards.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ...errors import UserError, exit_code, first_line, whose
from ...errors.console import never_end_by_writing
from ...errors.disk import of_disk
from .. import upstream
from ..host.cluster import World, world_from_environment
from . import exchange, launched, stop, tell
from .exchange import T
from .process import Peers, this_process


def start(world: World, alone: bool = False) -> None:
    """Start torch's process group, once. A process that nothing launched needs none, unless `alone` asks for a group
    of one, as ZeRO and FSDP do."""
    if _group() or (world.launcher == "python" and not alone):
        return
    with this_process.timeline.within("imports"), upstream.quick_imports(this_process.own):
        from . import process_group
    with this_process.timeline.within("rendezvous"):
        process_group.join(world)


def gather(value: T) -> list[T]:
    """`value` of every rank, in rank order, on every rank. exchange.py says what may be sent, and what is raised."""
    if _group() is None:
        return [exchange.decode(exchange.encode(value), "rank 0")]  # what one rank may not send, none may
    return exchange.gather_in_group(value)


def gather_all(value: T) -> list[T]:
    """gather() over the ranks of all replicas; of an elastic run's own one, for there each is a run of its own."""
    own = gather(value)
    peers = this_process.peers
    if peers is None or peers.elastic:
        return own
    return [each for of_replica in peers.gather(own) for each in of_replica]


def largest(value: int) -> int:
    """The largest of all ranks' values, on every rank. Over gloo: `python -m benchmarks.stopping` measures it."""
    dist = _group()
    if dist is None or dist.get_world_size() == 1:
        return value
    import torch

    values = torch.tensor([value])
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return int(values)


def barrier() -> None:
    """Wait until every rank is here (over gloo where the group has it)."""
    gather(None)


def wait_for_all() -> None:
    """Wait until every rank is here, however long one of them writes. barrier() gives up after an hour."""
    dist = _group()
    if dist and dist.get_world_size() > 1:
        from . import process_group

        process_group.wait_for_all()
    barrier()  # nobody ends, and its store with it, before all have seen that


@contextmanager
def agreed(world: World):
    """Run a step that may fail on some ranks; leave it only when it went well on all of them.

    Raise SystemExit(2) everywhere if any rank raised a UserError, SystemExit(1) for any other exception, after
    exactly one rank, the lowest that failed, has printed why, with its host's name.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = of_disk(caught) or caught
    try:
        start(world)
    except Exception as caught:
        error = error or tell.no_rendezvous(caught)
        if _group() is None or not isinstance(caught, UserError):  # nobody to agree with
            tell.tell(error, world)
            raise SystemExit(2) from None
    try:
        dist = _group()
        if dist and dist.get_world_size() > 1:
            from . import process_group

            process_group.wait_for_all()
        mine = (exit_code(error), whose.of_error(error)[0]) if error else (None, None)
        of_ranks = gather((*mine, world.host))
    except Exception as caught:  # a rank is gone, and with it whatever it had to say
        fail(error or caught, world)
    codes = [code for code, _, _ in of_ranks]
    first = next((rank for rank, code in enumerate(codes) if code), None)
    if first is None:
        return
    if error is not None and world.rank == first:
        of = whose.of_ranks([(each, host) for _, each, host in of_ranks])
        tell.tell(error, world, None if whose.of_error(error)[1] else of)
    else:
        this_process.agent.note(follows=True)
    finish()  # nobody leaves before the first has printed its error
    raise SystemExit(codes[first])


def fail(
    error: BaseException,
    world: World,
    directory: Path | None = None,
    note_failure: Callable[[str], None] = lambda reason: None,
    explain: Callable[[BaseException], BaseException | None] = lambda error: None,
) -> None:
    """Report an error of the running training and leave at once with exit code 1, or 2 for a UserError.

    The first rank to fail tells why; ranks that fail because of it (a closed connection, a time-out) say one line.
    directory: where the run writes; note_failure: what the first rank to fail does with the reason; explain: an error in a
    user's terms, where the first to fail knows better ones
    KeyboardInterrupt and SystemExit go on as they are, except sys.exit(0): in mid-run it is an error, whoever calls it. Leaves
    by os._exit: destructors of a half-dead process group hang, and a rank that hangs keeps all others.
    """
    if isinstance(error, SystemExit) and not error.code:
        where = RuntimeError(f"sys.exit({'' if error.code is None else error.code}) was called in mid-run")
        error = where.with_traceback(error.__traceback__)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    error = of_disk(error, directory) or error
    if "killed by signal: Terminated" in str(error):
        time.sleep(2)  # a data reader: who ends those ends this rank as well, in a moment
    this_process.signals.leaving.acquire()  # a rank that was asked to end, and is about to say so, need not say what broke then
    from . import process_group

    first, ended = tell.first_to_fail(process_group.store_of_all(), process_group.ENDED) if _group() else (True, "")
    if first:
        with suppress(Exception):  # what cannot be explained is told as it is
            error = explain(error) or error
        reason = tell.tell(error, world)
        with suppress(Exception):
            note_failure(reason)
    else:
        this_process.agent.note(follows=True)
        why = ended or f"because another rank failed first ({first_line(error, 120)})"
        print(f"rank {world.rank} on {world.host} stops{':' * bool(ended)} {why}", file=sys.stderr)
        time.sleep(0.5)  # launchers take the exit code of the rank that ends first: let it be the one that failed first
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code(error))


def divided_by(peers: Peers) -> None:
    """Take each replica for a world of its own from here on, until whole_again(). peers: local.peers.Peers of this rank"""
    this_process.peers = peers


def whole_again() -> None:
    """Bring the replicas of an earlier run of this process, or of one that ends, back together. A collective of all ranks."""
    if this_process.peers is not None:
        peers, this_process.peers = this_process.peers, None
        peers.rejoin()


def finish() -> None:
    """Leave the process group in step: gloo's teardown can abort a finished run when one rank is early (exit -6)."""
    whole_again()
    dist = _group()
    if dist:
        barrier()
        this_process.signals.part()
        dist.destroy_process_group()


def run_to_the_end(main: Callable[[], object]) -> NoReturn:
    """Call main() and end this process with its exit code, without the interpreter's tear-down.

    C++ threads that the engines leave behind abort a process while the interpreter tears itself down ("terminate called
    without an active exception", exit -6), and a finished run or a reported mistake then looks like a crash.
    """
    never_end_by_writing()  # `train.py | head` ends its reader, not the run
    try:
        world = world_from_environment()
    except UserError as error:  # who could agree on it is not known
        print(error, file=sys.stderr)
        sys.exit(error.code)
    if world.launcher != "python":
        launched.supervise()
        launched.end_with_launcher()
    this_process.signals.listen(world.is_main_rank, launched=world.launcher != "python")
    this_process.own = True
    this_process.timeline.include_start()
    code: Any = 0
    try:
        main()
        finish()
        this_process.agent.note(done=True)
    except SystemExit as exit_:
        code = exit_.code
    if isinstance(code, str):  # sys.exit("message")
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()  # what Python's own libraries want done, wandb's last upload for one
    if this_process.signals.finished is not None:
        stop.end_by(this_process.signals.finished)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def free_port() -> int:
    """A TCP port of this host that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _group() -> ModuleType | None:
    """torch.distributed where the process group stands, else None. Imports nothing: a typo is reported without torch."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist and dist.is_available() and dist.is_initialized() else None
