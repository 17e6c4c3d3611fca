"""torch's flight recorder: which collectives a process has begun, and which of them are done.

It keeps 2,000 entries by default (TORCH_FR_BUFFER_SIZE; c10d/FlightRecorder.hpp:111), gloo's in one buffer and NCCL's in
another (ProcessGroupNCCL.hpp:1516, only in torch's CUDA builds; not tried here). torch's own debug server hands both out
(distributed/debug), but no documentation promises the functions. Its `torchfrtrace` fails on gloo's records: an operation of
gloo stays "scheduled" for ever, and `retired` says that it is done. Gloo's sends and receives, by which pipeline stages exchange
activations, are not recorded: the main thread's stack says whether it waits in one.
"""

import json
import sys
import threading

from ...errors.tables import Document, Fields

BUFFERS = ("nccl", "fr")  # fr: gloo's
EXCHANGE = "the exchange between stages"
# Where the main thread waits for other ranks in what is not recorded -> what it is called.
_WAITS = {
    "torch/distributed/pipelining/schedules.py": EXCHANGE,
    "torch/distributed/distributed_c10d.py": EXCHANGE,
    "brigade/train/distributed/process_group.py": "the wait for all ranks",
}


def records() -> Fields:
    """buffer -> what torch has recorded in this process. May be called while the main thread hangs in C."""
    if "torch.distributed" not in sys.modules:
        return {}
    from torch._C import _distributed_c10d

    dumps = {name: getattr(_distributed_c10d, f"_dump_{name}_trace_json", None) for name in BUFFERS}
    return {name: json.loads(dump(includeCollectives=True, onlyActive=False)) for name, dump in dumps.items() if dump}


def waits_in(found: Document) -> Fields:
    """The first collective of records() that is not done: {"collective", "number", "group"}; collective "" where all are, or
    what _WAITS calls it where this process then waits for others without a record. {} where nothing was recorded, and hence
    nothing is known."""
    known: Fields = {}
    for buffer in found.values():
        entries = buffer.get("entries", [])
        unfinished = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
        if unfinished:
            first = min(unfinished, key=lambda entry: entry["record_id"])
            number = first["p2p_seq_id" if first["is_p2p"] else "collective_seq_id"]
            return {"collective": first["profiling_name"], "number": number, "group": first["process_group"][0]}
        known |= {"collective": _wait_without_record()} if entries else {}
    return known


def _wait_without_record() -> str:
    """Return what the main thread waits for other ranks in, by the function that it is in, or ""."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    file = frame.f_code.co_filename if frame else ""
    return next((words for ending, words in _WAITS.items() if file.endswith(ending)), "")
