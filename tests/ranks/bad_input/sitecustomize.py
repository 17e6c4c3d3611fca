"""Faults for test_bad_input.py and testbed/faults.py: Python imports this from PYTHONPATH at start-up. Nothing in the
product knows of it.

BRIGADE_TEST_FAULT:
    slow       rank 0 begins four seconds late
    elsewhere  rank 1 begins in the directory ./elsewhere
    step       rank 1 raises in its third training step
    nan        rank 1's loss is NaN in its third training step
    hang       rank 1 never gets beyond importing torch
    leave      every rank ends with exit code 0 instead of importing torch
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from pathlib import Path

FAULT, RANK = os.environ.get("BRIGADE_TEST_FAULT"), os.environ.get("RANK")


class _ThirdStep(importlib.abc.MetaPathFinder):
    """Lets brigade.training.trainer be imported, then gives its Trainer a compute_loss that fails the third time in training."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "brigade.training.trainer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        load = spec.loader.exec_module

        def load_and_break(module):
            load(module)
            whole, steps = module.Trainer.compute_loss, []

            def compute_loss(self, model, *args, **kwargs):
                steps.extend([1] * model.training)
                if not model.training or len(steps) != 3:
                    return whole(self, model, *args, **kwargs)
                if FAULT == "nan":
                    return whole(self, model, *args, **kwargs) * float("nan")
                Path(os.environ.get("BRIGADE_TEST_FAILED_AT", "failed_at")).write_text(str(time.time()))
                raise ValueError("the third step fails on this rank")

            module.Trainer.compute_loss = compute_loss

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
elif FAULT in ("step", "nan") and RANK == "1":
    sys.meta_path.insert(0, _ThirdStep())
elif (FAULT == "hang" and RANK == "1") or (FAULT == "leave" and RANK):
    sys.meta_path.insert(0, _NoTorch())
