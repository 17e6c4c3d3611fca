"""The process in which paths are tried: a kernel that crashes or hangs takes this process with it and no other.

It reads a job (JSON) from its standard input, and writes an event (a line of JSON) before and after whatever may fail:
{"ready": true}, {"begin": path, "stage": "prove" or "time"}, {"path", "stage", ...results}, {"end": true}. After a path that
failed or computed something else, it ends: such a kernel may have written where it should not.
"""

import ctypes
import json
import os
import signal
import sys

from ..train.distributed.devices import keep_fp32
from ..train.distributed.launched import PR_SET_PDEATHSIG
from .paths import Row


def main() -> None:
    """Read the job, and work on it until all is done or a path has failed."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no event

    def tell(event: Row) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # this process ends with the one that waits for it
    job = json.load(sys.stdin)
    # After what libraries print goes elsewhere, and before the first path's time begins: it imports torch.
    import torch

    from .trials import Trials

    keep_fp32()  # eager attention in fp32 is what others are compared with
    if job["device"] != "cpu":
        torch.cuda.set_device(job["device"])
    tell({"ready": True})
    Trials(job, tell).run()
    events.flush()
    os._exit(0)  # a broken kernel's destructors may hang


if __name__ == "__main__":
    main()
