"""What a run of testing/runs.py is disturbed by: callbacks of one rank, an end in the middle, wrong gradients."""

import contextlib
import gc
import io
from typing import Any, NoReturn

import torch
from torch._dynamo.utils import counters
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from transformers import TrainerCallback

import train
from brigade.train.distributed import ranks
from brigade.train.distributed.process import this_process
from brigade.train.model import load


def stops(when: tuple[int, int], rank: int) -> tuple[Any, ...]:
    """A callback by which one rank is asked to stop in one step, as by a SIGTERM to it alone. when: (rank, step)"""
    who, step = when

    class Stops(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if rank == who and state.global_step == step - 1:
                this_process.signals.ask(15)

    return (Stops(),)


def fails(when: tuple[int, int], rank: int) -> tuple[Any, ...]:
    """A callback that raises on one rank, before one step. when: (rank, step)"""

    class Fails(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if (rank, state.global_step + 1) == tuple(when):
                raise ValueError("as a callback of a user's may fail")

    return (Fails(),)


def asks() -> tuple[Any, ...]:
    """A callback by which the host reads each micro-step's loss, and so waits for the device."""

    def ask(_: Any, __: Any, output: Any) -> None:
        output.loss.item()

    class Asks(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            model.register_forward_hook(ask)

    return (Asks(),)


def counts_programs(counts: list[int]) -> tuple[Any, ...]:
    """A callback that appends after each step how many graphs torch has compiled for this run: it forgets those of runs before,
    for it compiles a layer for eight of them at most, and then silently computes it as it is."""
    torch.compiler.reset()
    counters.clear()

    class Counts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            counts.append(counters["stats"]["unique_graphs"])

    return (Counts(),)


def interrupted(flags: list[str], step: int) -> None:
    """A run that writes a checkpoint after this step, and dies."""

    class Stopped(Exception):
        pass

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save |= state.global_step == step

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                raise Stopped

        on_epoch_end = on_step_begin

    def fail(error: BaseException, *_: Any) -> NoReturn:
        raise error

    end, ranks.fail = ranks.fail, fail  # type: ignore[assignment]  # it would end this process
    try:
        with contextlib.suppress(Stopped), contextlib.redirect_stdout(io.StringIO()):
            train.main(flags, callbacks=(Stop(),))
    finally:
        ranks.fail = end
    for reader in [each for each in gc.get_objects() if isinstance(each, _MultiProcessingDataLoaderIter)]:
        reader._shutdown_workers()  # the garbage collector would wait five seconds for each of its processes
    gc.collect()


@contextlib.contextmanager
def damaged_gradients(wanted: bool) -> Any:
    whole = load.load_model

    def damage(_: Any, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 1.01)

    def damaged(*args: Any, **kwargs: Any) -> Any:
        model = whole(*args, **kwargs)
        # At the last layer that this rank has, and so of all that it has below. Engines keep layers: FSDP2 replaces parameters,
        # AutoTP the modules inside of a layer and the head, and a pipeline has the head on one rank alone.
        own = [layer for layer in model.get_decoder().layers if any(True for _ in layer.parameters())]
        own[-1].register_forward_hook(damage)
        return model

    if wanted:
        load.load_model = damaged
    try:
        yield
    finally:
        load.load_model = whole
