"""The processes that tokenise: forked, a few chunks ahead of their reader, their results in order."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from ...errors import UserError
from .encode import LoadedEncoder
from .encoded import Encoded
from .keys import Columns
from .rows import Chunk

# chunks for each process, read and not yet asked for: a bound of memory, and a bridge over chunks of uneven cost
AHEAD = 4
_ENCODER = "encoder"  # the attribute that multiprocessing's object of a process that tokenises has for it

Job = tuple[Chunk, Columns, str | None]  # and Source.image_folder


def encoded(jobs: Iterator[Job], encoder: LoadedEncoder, processes: int, place: str) -> Iterator[Encoded]:
    """Yield each chunk tokenised, in order. Raises what a chunk raises there, and UserError at `place` when a process is killed
    (multiprocessing.Pool would start another one, and wait for ever for the lost chunk)."""
    # Forked, not spawned: a child shares what is loaded, the tokenizer too. It uses only that and Jinja, and with images PIL and
    # their processor.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _set_up, (encoder,))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(_encode, job))
            if len(waiting) > AHEAD * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            place,
            f"one of the {processes} processes that tokenise it was killed, most often for lack of memory",
            "set dataset_num_proc lower, or free memory",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _set_up(encoder: LoadedEncoder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the parent ends its children
    threading.Thread(target=_end_with_parent, daemon=True).start()
    vars(multiprocessing.current_process())[_ENCODER] = encoder
    if encoder.encoder.images is not None:  # it computes with torch, whose threads a fork does not take along
        import torch

        torch.set_num_threads(1)


def _end_with_parent() -> None:
    """End this process when its parent ends: one that is killed tells nobody, and its children would wait for chunks."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _encode(job: Job) -> Encoded:
    encoder: LoadedEncoder = vars(multiprocessing.current_process())[_ENCODER]
    return encoder.encode(*job)
