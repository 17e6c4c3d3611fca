"""A step asks the device for one value, which the host waits for: the gradients' norm, judged before the optimizer's step."""

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import train
from brigade.train.loop.trainer import Trainer
from testing import runs

# What a tensor's .item(), .tolist(), bool() and a mask as an index end in: on a GPU each waits for all that is queued.
ASKS = ("_local_scalar_dense", "nonzero", "equal")


class Asked(TorchDispatchMode):
    """Counts ASKS while `counting`."""

    def __init__(self):
        super().__init__()
        self.counting, self.found = False, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if self.counting and name in ASKS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention, packing", [("varlen", True), ("varlen", False), ("sdpa", True)])
def test_a_step_asks_the_device_for_the_norm_alone(attention, packing, tmp_path, monkeypatch):
    shared = runs.write_inputs(tmp_path)
    begin, end, asked = Trainer.get_batch_samples, Trainer._maybe_log_save_evaluate, Asked()

    def begun(self, *arguments):
        batches = begin(self, *arguments)
        asked.counting = True
        return batches

    def ended(self, *arguments, **named):
        asked.counting = False
        return end(self, *arguments, **named)

    monkeypatch.setattr(Trainer, "get_batch_samples", begun)  # the first thing of a step, and the last
    monkeypatch.setattr(Trainer, "_maybe_log_save_evaluate", ended)
    with asked:
        trainer = train.main(
            [
                *shared,
                "--max_steps",
                "3",
                "--packing",
                str(packing),
                "--attn_implementation",
                attention,
                *[
                    "--per_device_train_batch_size",
                    "4",
                    "--eval_answers",
                    "0",
                    "--global_batch_size",
                    "8",
                    "--output_dir",
                ],
                str(tmp_path / "run"),
            ]
        )
    assert trainer.state.global_step == 3 and asked.found == {"_local_scalar_dense": 3}
