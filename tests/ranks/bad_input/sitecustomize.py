"""Faults for testing/train_command.py and testbed/faults.py: Python imports this from PYTHONPATH at start-up. Nothing in the
product knows of it.

BRIGADE_TEST_FAULT:
    slow       rank 0 begins four seconds late
    elsewhere  rank 1 begins in the directory ./elsewhere
    step       rank 1 raises in its third training step
    nan        rank 1's loss is NaN in its third training step
    sleeping-data, sleeping-in-forward, stopped, killed-in-forward, killed-in-optimizer   what rank 1 does in its third step
    killed-in-loading   rank 1 is killed the first time that it loads a checkpoint (BRIGADE_TEST_FAILED_AT remembers it)
    killed-in-fourth   likewise the first time that it comes to the fourth step, in a forward pass
    astray     a weight of rank 2 changes in its third step, once (BRIGADE_TEST_FAILED_AT): no loss shows it
    slow-forward   rank 1 takes 0.3 seconds longer for each step from the third on
    hang       rank 1 never gets beyond importing torch
    leave      every rank ends with exit code 0 instead of importing torch
    leaves, exits   rank 1 ends with exit code 0 in its third step, by os._exit(0) and by sys.exit(0)
    hangs-at-exit   rank 1 does not end, though all its work is done
"""

import atexit
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

FAULT, RANK = os.environ.get("BRIGADE_TEST_FAULT"), os.environ.get("RANK")
BROKEN = "2" if FAULT == "astray" else "1"  # of three, two are right


def _raise(trainer):
    Path(os.environ.get("BRIGADE_TEST_FAILED_AT", "failed_at")).write_text(str(time.time()))
    raise ValueError("the third step fails on this rank")


def _sleep_in_loader(trainer):
    type(trainer.collate).__call__ = _sleep


def _sleep(*_):
    while True:
        time.sleep(1)


def _kill(trainer, number=signal.SIGKILL):
    os.kill(os.getpid(), number)


def _first_time():
    mark = Path(os.environ["BRIGADE_TEST_FAILED_AT"])
    return not mark.exists() and not mark.touch()


def _kill_once(trainer):
    if _first_time():
        _kill(trainer)


def _go_astray(trainer):
    if _first_time():
        [*trainer.model.parameters()][-1].data.view(-1)[:1].mul_(1.001)


def _kill_once_in_fourth(trainer):
    if trainer.state.global_step == 3:
        _kill_once(trainer)


def _kill_in_step(trainer):
    trainer.optimizer.optimizer.register_step_pre_hook(lambda *_: _kill(trainer))


def _sleep_in_model(trainer):
    if not getattr(trainer, "slowed", False):
        trainer.slowed = True
        trainer.model.get_output_embeddings().register_forward_pre_hook(lambda *_: time.sleep(0.3))


def _nan(trainer):
    """Once."""
    if not getattr(trainer, "had_nan", False):
        trainer.had_nan = True
        head = trainer.model.get_output_embeddings()
        hook = head.register_forward_hook(lambda module, given, out: hook.remove() or out * float("nan"))


# fault -> a method of the Trainer, and what its third call, and each further one, does first
IN_THIRD_STEP = {
    "step": ("training_step", _raise),
    "sleeping-data": ("get_batch_samples", _sleep_in_loader),
    "sleeping-in-forward": ("compute_loss", _sleep),
    "killed-in-forward": ("compute_loss", _kill),
    "stopped": ("outputs", lambda trainer: _kill(trainer, signal.SIGSTOP)),
    "killed-in-optimizer": ("training_step", _kill_in_step),
    "slow-forward": ("training_step", _sleep_in_model),
    "nan": ("compute_loss", _nan),
    "astray": ("training_step", _go_astray),
    "leaves": ("compute_loss", lambda trainer: os._exit(0)),
    "exits": ("compute_loss", lambda trainer: sys.exit(0)),
}
SERVE_BOTH = ("compute_loss", "outputs")  # a pipeline's trainer has a compute_loss of its own, and the same `outputs`
# The same, from the first call on.
AT_ONCE = {
    "killed-in-loading": ("_load_optimizer_and_scheduler", _kill_once),
    "killed-in-fourth": ("outputs", _kill_once_in_fourth),
}


def break_trainer(trainer_class):
    """Give the Trainer a method that does something else first."""
    name, fail = (IN_THIRD_STEP | AT_ONCE)[FAULT]
    whole, calls, first = getattr(trainer_class, name), [], 3 if FAULT in IN_THIRD_STEP else 1

    def broken(trainer, *args, **kwargs):
        # Neither evaluations count, some methods serve both, nor where no checkpoint is to be loaded.
        calls.extend([1] * (args[0] is not None and (name not in SERVE_BOTH or trainer.model.training)))
        if len(calls) >= first:
            fail(trainer)
        return whole(trainer, *args, **kwargs)

    setattr(trainer_class, name, broken)


class _BrokenTrainer(importlib.abc.MetaPathFinder):
    """Lets brigade.train.step.trainer be imported, then breaks its Trainer."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "brigade.train.step.trainer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        load = spec.loader.exec_module

        def load_and_break(module):
            load(module)
            break_trainer(module.Trainer)

        spec.loader.exec_module = load_and_break
        return spec


class _NoTorch(importlib.abc.MetaPathFinder):
    """Who asks for torch waits for ever, or ends as if all were well."""

    def find_spec(self, fullname, path=None, target=None):
        while fullname == "torch":
            if FAULT == "leave":
                os._exit(0)
            time.sleep(1)


if FAULT == "slow" and RANK == "0":
    time.sleep(4)
elif FAULT == "elsewhere" and RANK == "1":
    os.chdir("elsewhere")
elif FAULT == "hangs-at-exit" and RANK == "1":
    atexit.register(time.sleep, 3600)
elif FAULT in IN_THIRD_STEP | AT_ONCE and RANK == BROKEN:
    sys.meta_path.insert(0, _BrokenTrainer())
elif (FAULT == "hang" and RANK == "1") or (FAULT == "leave" and RANK):
    sys.meta_path.insert(0, _NoTorch())
