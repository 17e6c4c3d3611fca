"""fp16 on a CPU: scaled losses give the gradients of fp32, and an overflow on one rank skips the step on all of them alike."""

import contextlib
import hashlib
import io
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from testing import marks, parity, runs
from testing.command_line import as_flags
from testing.ranks import run_ranks

# DeepSpeed trains in fp16 on CPUs that have instructions for it (accelerator/cpu_accelerator.py: is_fp16_supported); on others a
# run is refused, and tests/unit/test_attention.py holds that.
ZERO = ("zero1", "zero2", "zero3") if torch.ops.mkldnn._is_mkldnn_fp16_supported() else ()
STRATEGIES = ("ddp", *ZERO, "fsdp2")
QUICK = [name for name in ("zero2", "fsdp2") if name in STRATEGIES]
OTHERS = ["ddp+adamw_torch_fused", "fsdp2+adamw_torch_fused"]  # which is told of an overflow, and skips by itself
OTHERS += ["ddp+adamw_torch_fused+biases"]
BIASES = [
    "--from_scratch",
    "false",
    "--router_bias_update_rate",
    "0.1",
    "--model_name_or_path",
]  # routers' follow each step
SOUND, STEPS = 4, 6  # in the last two the loss of rank 1 alone is far beyond fp16


def routers_biases(model):
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")}


class Watch(TrainerCallback):
    """Keeps of each step on this rank whether it changed any weight, and the scale after it."""

    def __init__(self):
        self.changed, self.scales = [], []

    def weights(self, model):
        held = hashlib.sha256()
        for parameter in (*model.parameters(), *routers_biases(model).values()):
            mine = getattr(parameter, "ds_tensor", parameter).detach()
            mine = mine.to_local() if hasattr(mine, "to_local") else mine
            mine = mine.clone()  # FSDP2 resizes what numpy would share
            held.update(mine.view(-1).view(torch.uint8).numpy().tobytes())
        return held.hexdigest()

    def on_step_begin(self, args, state, control, model=None, **_):
        self.before = self.weights(model)

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        self.changed.append(self.weights(model) != self.before)
        scaler = getattr(optimizer, "scaler", None)
        self.scales.append(float(scaler.get_scale() if scaler else optimizer.optimizer.loss_scale))


def work(folder):
    import train
    from brigade.train.distributed import ranks
    from brigade.train.step.trainer import Trainer

    rank, sound = int(os.environ["RANK"]), Trainer.compute_loss

    def compute_loss(self, model, *args, **options):
        loss = sound(self, model, *args, **options)
        beyond = model.training and self.args.fp16 and rank == 1 and self.state.global_step >= SOUND
        return loss * 1e9 if beyond else loss

    Trainer.compute_loss = compute_loss
    for name, flags in json.loads((folder / "cases.json").read_text()).items():
        watch, said = Watch(), io.StringIO()
        with contextlib.redirect_stdout(said):
            watching = (watch,) if "fp16" in name else ()
            trainer = train.main([*flags, "--output_dir", str(folder / "outputs" / name)], callbacks=watching)
        held = ranks.gather((watch.changed, watch.scales))
        if rank == 0:
            log = [entry for entry in trainer.state.log_history if "loss" in entry]
            found = {key: [entry[key] for entry in log] for key in ("loss", "grad_norm")}
            (folder / f"{name}.json").write_text(json.dumps(found | {"held": held, "said": said.getvalue()}))
        runs.forget(trainer)


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    folder = tmp_path_factory.mktemp("fp16")
    # No epoch ends in these steps, where a rank may have nothing to learn from.
    few = as_flags(max_steps=STEPS, global_batch_size=8, per_device_train_batch_size=4, eval_steps=None)
    shared = [*runs.write_inputs(folder), "--optim", "sgd", "--learning_rate", "0.6", *few]
    cases = {"fp32": [*shared, *parity.STRATEGIES["ddp"]]}
    for name in sorted(asked_for("strategy")):
        strategy, optim, *biases = [*name.split("+"), "", ""][:3]
        adam = ["--optim", optim, "--learning_rate", "1e-3"] if optim else []
        if any(biases):
            adam += [*BIASES, str(runs.write_model(folder / "minimax_m2", "minimax_m2"))]
        cases[f"fp16-{name}"] = [*shared, *parity.STRATEGIES[strategy], *adam, "--fp16"]
    (folder / "cases.json").write_text(json.dumps(cases))
    done = run_ranks("tests.ranks.test_fp16", str(folder), ranks=2, timeout=600)
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("fp*.json")}
    return found, done.stderr[-3000:]


@pytest.mark.parametrize("strategy", marks.cases(*QUICK, slow=["ddp"], matrix=STRATEGIES))
def test_scaled_gradients_are_those_of_fp32(strategy, results):
    found, said = results
    assert f"fp16-{strategy}" in found, said
    for key in ("loss", "grad_norm"):
        half, full = (found[name][key][:SOUND] for name in (f"fp16-{strategy}", "fp32"))
        assert half == pytest.approx(full, rel=5e-3) and half != full, key  # fp16 has 11 bits
    assert "fp16 (slow on a CPU: for trials)" in found[f"fp16-{strategy}"]["said"]


@pytest.mark.parametrize("strategy", marks.cases(*QUICK, slow=["ddp", *OTHERS], matrix=STRATEGIES))
def test_an_overflow_on_one_rank_skips_the_step_on_all(strategy, results):
    found, said = results
    assert f"fp16-{strategy}" in found, said
    (changed, scales), other = found[f"fp16-{strategy}"]["held"]
    assert [changed, scales] == other
    assert changed == [True] * SOUND + [False] * (STEPS - SOUND)
    assert len(set(scales[:SOUND])) == 1 and scales[-1] < scales[SOUND - 1]  # DeepSpeed halves at the second in a row


if __name__ == "__main__":
    from brigade.train.distributed import ranks

    ranks.run_to_the_end(lambda: work(Path(sys.argv[1])))
