"""All ranks as one program: the process group, agreement before the model is built, and one message per error.

A launcher kills the other ranks as soon as one leaves, so a message that the wrong rank prints a second later is lost
(seen under torchrun, accelerate and deepspeed). Hence: before the model is built every rank takes part in one
exchange of errors, the first that has one prints it, and the others leave only afterwards.
"""

import atexit
import datetime
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from ..cluster import World, world_from_environment
from ..errors import UserError, exit_code, of_disk
from ..errors.console import counted, write_what_it_can
from . import stop, supervised

# How long to wait for all ranks to appear, and then for each other: one may download or tokenise for a long time.
RENDEZVOUS_TIMEOUT = datetime.timedelta(minutes=10)
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=60)
PATIENCE = 15  # seconds after which a host says that it waits for others
_waits = itertools.count()  # of _wait_for_all: as many on every rank
peers: Any = None  # replicas.Peers, while each replica of the run is a world of its own
launchers_store: Any = None  # the one of all ranks, once a run had replicas
_ENDED = "brigade/ended"  # in the store: which rank ended at once, by a signal


def start(world: World, alone: bool = False) -> None:
    """Start torch's process group, once. A process that nothing launched needs none, unless `alone` asks for a group
    of one, as ZeRO and FSDP do.

    On GPU hosts the group has NCCL for GPU tensors and gloo for CPU ones, so that agreement between ranks
    never depends on a healthy NCCL.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # 25 lines of C++ frames for each peer that is gone
    if _group() or (world.launcher == "python" and not alone):
        return
    import torch
    import torch.distributed as dist

    if (
        torch.cuda.device_count() >= world.local_size
    ):  # else preflight.check_host says so, and needs a group to say it in
        torch.cuda.set_device(world.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    supervised.note(stage="waiting")
    impatient = threading.Timer(PATIENCE, _say_that_it_waits, [world])
    impatient.daemon = True
    impatient.start()
    try:
        dist.init_process_group(backend, timeout=RENDEZVOUS_TIMEOUT)
    finally:
        impatient.cancel()
    dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT)
    supervised.note(stage="joined")
    stop.tell_others = lambda by: _tell_that_it_is_ended(world, by)


def _tell_that_it_is_ended(world: World, by: str) -> None:
    # Where the store ended with rank 0, or the ranks part at this moment, nobody is left to be told.
    with suppress(RuntimeError, ValueError):
        common_store().set(_ENDED, f"rank {world.rank} on {world.host} was ended by {by}")


def _say_that_it_waits(world: World) -> None:
    """One line of each host. Torch's store does not tell who is there already."""
    if world.local_rank != 0:
        return
    cure = "does the same command run on every host, and does each reach that address?"
    if world.launcher == "environment":  # no launcher's own variables: those of an earlier job, as often as not
        cure = "if you meant one process: unset RANK WORLD_SIZE"
    others, so_far = counted(world.size - 1, "other rank"), f"since {PATIENCE} s, and will for {RENDEZVOUS_TIMEOUT}"
    line = f"rank {world.rank} on {world.host} is waiting for {others} at {_address()} {so_far}: {cure}"
    print(line, file=sys.stderr, flush=True)


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def gather(value: Any) -> list[Any]:
    """`value` (any picklable object) of every rank, in rank order, on every rank."""
    dist = _group()
    if dist is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_all(value: Any) -> list[Any]:
    """gather() over the ranks of all replicas."""
    own = gather(value)
    return own if peers is None else [each for of_replica in peers.gather(own) for each in of_replica]


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


@contextmanager
def agreed(world: World):
    """Run a step that may fail on some ranks; leave it only when it went well on all of them.

    Raises SystemExit(2) everywhere if any rank raised a UserError, SystemExit(1) for any other exception, after
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
        from .report import report

        problem = (str(caught).splitlines() or [type(caught).__name__])[0][:200]
        cure = "give the launcher an address that all hosts reach and a port that is free"
        if "gloo" in str(caught).lower():  # the address was found, and other ports are closed
            cure = "open all TCP ports between the hosts: gloo chooses its own (net.ipv4.ip_local_port_range)"
        report(error or UserError(f"rendezvous at {_address()}", problem, cure), world)
        raise SystemExit(2) from None
    try:
        _wait_for_all()
        codes = gather(None if error is None else exit_code(error))
    except Exception as caught:  # a rank is gone, and with it whatever it had to say
        fail(error or caught, world)
    first = next((rank for rank, code in enumerate(codes) if code), None)
    if first is None:
        return
    if error is not None and world.rank == first:
        from .report import report

        report(error, world)
    else:
        supervised.note(follows=True)
    finish()  # nobody leaves before the first has printed its error
    raise SystemExit(codes[first])


def _wait_for_all() -> None:
    """Wait until every rank is here, without a clock: one host may download or tokenise for hours while the others have
    it in their caches, and a collective would give up after COLLECTIVE_TIMEOUT. Who dies is the launcher's to notice."""
    dist = _group()
    if dist is None or dist.get_world_size() == 1:
        return
    store, name = common_store(), f"brigade/wait-{next(_waits)}"
    here, pause = store.add(name, 1), 0.002
    while here < dist.get_world_size():
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
        here = store.add(name, 0)


def fail(error: BaseException, world: World, directory: Path | None = None) -> None:
    """Report an error of the running training and leave at once with exit code 1, or 2 for a UserError.

    The first rank to fail tells why; ranks that fail because of it (a closed connection, a time-out) say one line.
    directory: where the run writes
    KeyboardInterrupt and SystemExit go on as they are. Leaves by os._exit: destructors of a half-dead process group hang,
    and a rank that hangs keeps all others.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    error = of_disk(error, directory) or error
    if "killed by signal: Terminated" in str(error):
        time.sleep(2)  # a data reader: who ends those ends this rank as well, in a moment
    stop.leaving.acquire()  # a rank that was asked to end, and is about to say so, need not say what broke then
    first, ended = True, ""
    try:
        if _group():
            store = common_store()
            store.set_timeout(datetime.timedelta(seconds=5))
            if store.check([_ENDED]):
                ended = store.get(_ENDED).decode()
            first = not ended and store.add("brigade/failed", 1) == 1
    except Exception:  # the store died with rank 0: somebody else was first
        first = False
    if first:
        from .report import report

        report(error, world)
    elif ended:
        supervised.note(follows=True)
        print(f"rank {world.rank} on {world.host} stops: {ended}", file=sys.stderr)
    else:
        supervised.note(follows=True)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        print(f"rank {world.rank} on {world.host} stops because another rank failed first ({reason})", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code(error))


def whole_again() -> None:
    """Bring the replicas of an earlier run of this process, or of one that ends, back together. A collective of all ranks."""
    if peers is not None:
        peers.rejoin()


def finish() -> None:
    """Leave the process group in step: gloo's teardown can abort a finished run when one rank is early (exit -6)."""
    whole_again()
    dist = _group()
    if dist:
        barrier()
        stop.parted = True
        dist.destroy_process_group()


def run_to_the_end(main: Callable[[], Any]) -> NoReturn:
    """Call main() and end this process with its exit code, without the interpreter's tear-down.

    C++ threads that the engines leave behind abort a process while the interpreter tears itself down ("terminate called
    without an active exception", exit -6), and a finished run or a reported mistake then looks like a crash.
    """
    write_what_it_can()
    supervised.supervise()
    supervised.end_with_launcher()
    world = world_from_environment()
    stop.listen(world.is_main_rank, launched=world.launcher != "python")
    code: Any = 0
    try:
        main()
        finish()
    except SystemExit as exit_:
        code = exit_.code
    if isinstance(code, str):  # sys.exit("message")
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()  # what Python's own libraries want done, wandb's last upload for one
    if stop.finished is not None:
        stop.end_by(stop.finished)
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


def common_store() -> Any:
    """Of all ranks of the run."""
    from torch.distributed.distributed_c10d import _get_default_store

    return launchers_store or _get_default_store()
