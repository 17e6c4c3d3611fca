"""All ranks as one program: the process group, agreement before the model is built, and one message per error.

A launcher kills the other ranks as soon as one leaves, so a message that the wrong rank prints a second later is lost
(seen under torchrun, accelerate and deepspeed). Hence: before the model is built every rank takes part in one
exchange of errors, the first that has one prints it, and the others leave only afterwards.
"""

import atexit
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from ...errors import exit_code, first_line, whose
from ...errors.console import guard_output
from ...errors.disk import of_disk
from ..cluster import World, world_from_environment
from . import exchange, launched, stop, supervised, tell

_peers: Any = None  # replicas.Peers, while each replica of the run is a world of its own


def start(world: World, alone: bool = False) -> None:
    """Start torch's process group, once. A process that nothing launched needs none, unless `alone` asks for a group
    of one, as ZeRO and FSDP do."""
    if _group() or (world.launcher == "python" and not alone):
        return
    from . import process_group

    process_group.join(world)


def gather(value: Any) -> list[Any]:
    """`value` of every rank, in rank order, on every rank. exchange.py says what may be sent, and what is raised."""
    if _group() is None:
        return [exchange.decode(exchange.encode(value), "rank 0")]  # what one rank may not send, none may
    return exchange.gather_in_group(value)


def gather_all(value: Any) -> list[Any]:
    """gather() over the ranks of all replicas; of an elastic run's own one, for there each is a run of its own."""
    own = gather(value)
    divided = _peers is not None and not _peers.elastic
    return [each for of_replica in _peers.gather(own) for each in of_replica] if divided else own


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
    if (dist := _group()) and dist.get_world_size() > 1:
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
    except Exception as caught:  # no group, hence nobody to agree with
        tell.tell(error or tell.no_rendezvous(caught), world)
        raise SystemExit(2) from None
    try:
        if (dist := _group()) and dist.get_world_size() > 1:
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
        supervised.note(follows=True)
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
    KeyboardInterrupt and SystemExit go on as they are, but for sys.exit(0): in mid-run it is an error, whoever calls it. Leaves
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
    stop.process.leaving.acquire()  # a rank that was asked to end, and is about to say so, need not say what broke then
    from . import process_group, tell

    first, ended = tell.first_to_fail(process_group.store_of_all(), process_group.ENDED) if _group() else (True, "")
    if first:
        with suppress(Exception):  # what cannot be explained is told as it is
            error = explain(error) or error
        reason = tell.tell(error, world)
        with suppress(Exception):
            note_failure(reason)
    else:
        supervised.note(follows=True)
        why = ended or f"because another rank failed first ({first_line(error, 120)})"
        print(f"rank {world.rank} on {world.host} stops{':' * bool(ended)} {why}", file=sys.stderr)
        time.sleep(0.5)  # launchers take the exit code of the rank that ends first: let it be the one that failed first
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code(error))


def divided_by(peers: Any) -> None:
    """Take each replica for a world of its own from here on, until whole_again(). peers: replicas.Peers of this rank"""
    global _peers
    _peers = peers


def whole_again() -> None:
    """Bring the replicas of an earlier run of this process, or of one that ends, back together. A collective of all ranks."""
    global _peers
    if _peers is not None:
        peers, _peers = _peers, None
        peers.rejoin()


def finish() -> None:
    """Leave the process group in step: gloo's teardown can abort a finished run when one rank is early (exit -6)."""
    whole_again()
    dist = _group()
    if dist:
        barrier()
        stop.process.part()
        dist.destroy_process_group()


def run_to_the_end(main: Callable[[], Any]) -> NoReturn:
    """Call main() and end this process with its exit code, without the interpreter's tear-down.

    C++ threads that the engines leave behind abort a process while the interpreter tears itself down ("terminate called
    without an active exception", exit -6), and a finished run or a reported mistake then looks like a crash.
    """
    guard_output()
    world = world_from_environment()
    if world.launcher != "python":
        launched.supervise()
        launched.end_with_launcher()
    stop.process.listen(world.is_main_rank, launched=world.launcher != "python")
    code: Any = 0
    try:
        main()
        finish()
        supervised.note(done=True)
    except SystemExit as exit_:
        code = exit_.code
    if isinstance(code, str):  # sys.exit("message")
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()  # what Python's own libraries want done, wandb's last upload for one
    if stop.process.finished is not None:
        stop.end_by(stop.process.finished)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def free_port() -> int:
    """A TCP port of this host that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _group() -> Any:
    """torch.distributed where the process group stands, else None. Imports nothing: a typo is reported without torch."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist and dist.is_available() and dist.is_initialized() else None
