"""How a rank says what went wrong."""

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from ..cluster import World
from ..errors import UserError, exit_code
from . import stop, supervised


def tell(error: BaseException, world: World) -> str:
    """Say on stderr what went wrong; returns it in a line. Torchrun and accelerate bury that under 40 lines of their own, of
    which the last quote what a rank left in the error file: there the reason stands once more, in one line."""
    where = f"error on {world.host}, rank {world.rank} of {world.size}"
    if isinstance(error, UserError):
        reason = " ".join(f"{error.place}: {error.problem}; {error.cure}".split())
        message = str(error).replace("error", where, 1)
    else:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
        if len(lines) > 40:  # frames of the engines' insides help nobody: the last ones say what broke
            lines = [*lines[:2], f"  ... {len(lines) - 32} lines ...", *lines[-30:]]
        message = "\n".join([f"{where}: {type(error).__name__}", *lines])
    with stop.leaving:
        pass
    supervised.note(told=message, code=exit_code(error))
    print(message, file=sys.stderr, flush=True)
    tell_launcher(reason)
    return f"rank {world.rank} on {world.host}: {reason}"


def tell_launcher(reason: str) -> None:
    """Leave the reason of this rank's end where torchrun and accelerate look for it."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # They take the earliest failure, in whole seconds, for the cause.
        extra = {"py_callstack": f"{reason} (reported above)", "timestamp": str(int(time.time()) - 1)}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": reason, "extraInfo": extra}}))
