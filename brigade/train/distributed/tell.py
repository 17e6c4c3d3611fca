"""How a rank says what went wrong, and whether it is the one to say it."""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UserError, exit_code, first_line, whose
from ...errors.console import counted
from ..host.cluster import World
from .process import this_process

if TYPE_CHECKING:
    from torch.distributed import Store


LONG = 40  # lines of a traceback that are told whole
# Of a longer one: last lines of the exception that ended the rank, and of each one before; of these the first and so many others.
OF_LAST, OF_EARLIER, LINKS = 30, 8, 3
_CHAINED = re.compile(
    r"(\n\n(?:During handling of the above exception|The above exception was the direct cause)[^\n]*:\n\n)"
)


def tell(error: BaseException, world: World, of: tuple[str, tuple[str, ...]] | None = None) -> str:
    """Say on stderr what went wrong; returns it in a line. Torchrun and accelerate bury that under 40 lines of their own, of
    which the last quote what a rank left in the error file: there the reason stands once more, in one line.

    of: whose.of_error(error), where the ranks together know it better
    """
    where = f"error on {world.host}, rank {world.rank} of {world.size}"
    if isinstance(error, UserError):
        reason = " ".join(f"{error.place}: {error.problem}; {error.cure}".split())
        message = str(error).replace("error", where, 1)
    else:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        message = f"{where}: {type(error).__name__}\n{in_short(''.join(traceback.format_exception(error)).rstrip())}"
    with this_process.signals.leaving:
        pass
    what, hosts = of or whose.of_error(error)
    this_process.agent.note(told=message, code=exit_code(error), whose=what, hosts=hosts)
    print(message, file=sys.stderr, flush=True)
    tell_launcher(reason)
    return f"rank {world.rank} on {world.host}: {reason}"


def in_short(text: str) -> str:
    """A traceback of LONG lines at most as it is. Of a longer one, the first and last lines of each exception in its chain: the
    frames of engines' insides help nobody, and the last lines say what broke."""
    if text.count("\n") < LONG:
        return text
    *before, last = _CHAINED.split(text)  # exceptions, and between them the sentences that chain them
    left_out = len(before) // 2 - 1 - LINKS
    if left_out > 0:
        before[2 : 2 + 2 * left_out] = [f"  ... {left_out} exceptions ...\n"]
    return "".join([*(_ends(part, OF_EARLIER) for part in before), _ends(last, OF_LAST)])


def _ends(text: str, last: int) -> str:
    """The first two and so many last lines of a text."""
    lines = text.splitlines(keepends=True)
    left_out = len(lines) - 2 - last
    return text if left_out < 2 else "".join([*lines[:2], f"  ... {left_out} lines ...\n", *lines[-last:]])


def tell_launcher(reason: str) -> None:
    """Leave the reason of this rank's end where torchrun and accelerate look for it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        # They take the earliest failure, in whole seconds, for the cause.
        extra = {"py_callstack": f"{reason} (reported above)", "timestamp": str(int(time.time()) - 1)}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": reason, "extraInfo": extra}}))


def no_rendezvous(error: Exception) -> UserError:
    """The error of process_group.join(), as a user can cure it."""
    if isinstance(error, UserError):
        return error
    cure = "give the launcher an address that all hosts reach and a port that is free"
    if "gloo" in str(error).lower():  # the address was found, and other ports are closed
        cure = "open all TCP ports between the hosts: gloo chooses its own (net.ipv4.ip_local_port_range)"
    return UserError(f"rendezvous at {_address()}", first_line(error, 200), cure, "passing")


def first_to_fail(store: Store, of_ended: str) -> tuple[bool, str]:
    """(whether no other rank failed or was ended before this one; which one was ended, and by what)

    store: of all ranks; of_ended: its key for that
    """
    try:
        from . import one_host

        if one_host.rank_0_is_gone():
            return False, ""
        store.set_timeout(datetime.timedelta(seconds=5))
        ended = store.get(of_ended).decode() if store.check([of_ended]) else ""
        return not ended and store.add("brigade/failed", 1) == 1, ended
    except Exception:  # the store died with rank 0: somebody else was first
        return False, ""


def that_it_waits(world: World, so_far: int, until: datetime.timedelta) -> None:
    """Say, in one line of each host, that it has waited for the other ranks for so_far seconds. Torch's store does not tell who
    is there already."""
    if world.local_rank != 0:
        return
    cure = "does the same command run on every host, and does each reach that address?"
    if world.launcher == "environment":  # no launcher's own variables: those of an earlier job, as often as not
        cure = "if you meant one process: unset RANK WORLD_SIZE"
    others, since = counted(world.size - 1, "other rank"), f"since {so_far} s, and will for {until}"
    line = f"rank {world.rank} on {world.host} is waiting for {others} at {_address()} {since}: {cure}"
    print(line, file=sys.stderr, flush=True)


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
