"""New tokens (add_tokens) under every strategy: the losses of one process, also after a stop; and what is saved serves."""

import json
import math

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from brigade.__main__ import main
from brigade.eval import held_out_loss
from brigade.train.checkpoint import reading
from brigade.train.data.prepare import prepare
from brigade.train.model.location import load_config
from brigade.train.recipe import flags
from brigade.train.strategy.axes import Axes
from testing import axes, marks, parity, runs

NEW = ["--add_tokens", "does,signature", "--add_special_tokens", "<|im_start|>,<|tool|>"]  # of which one is not new
ROWS = ["--use_peft", "--trainable_token_indices", "does,signature,<|tool|>"]
WHOLE = ["--use_peft", "--lora_target_modules", "q_proj", "--lora_modules_to_save", "embed_tokens,lm_head"]
KINDS = {
    "full": ["--learning_rate", "0.3"],
    "rows": [*ROWS, "--learning_rate", "1"],
    "whole": [*WHOLE, "--learning_rate", "0.3"],
}
STRATEGIES = parity.STRATEGIES | {
    "tensor": axes.flags(Axes(tensor=2), "ddp"),
    "pipeline": axes.flags(Axes(stages=2), "ddp"),
    "stopped": parity.STRATEGIES["fsdp2"],
}
UNDER = {
    "full": ("ddp", "zero2", "zero3", "fsdp2", "tensor", "pipeline"),
    "rows": ("ddp", "zero3", "fsdp2", "stopped"),
    "whole": ("zero3", "fsdp2"),
}
CASES = [f"{kind}-{strategy}" for kind, strategies in UNDER.items() for strategy in strategies]


def case(name, ranks=1):
    kind, strategy = name.split("-")
    micro = runs.GLOBAL_BATCH // ranks * (2 if strategy in ("tensor", "pipeline") else 1)
    words = ["--max_steps", "4", "--optim", "sgd", "--per_device_train_batch_size", str(micro), *NEW, *KINDS[kind]]
    stops = {"stops": (2,)} if strategy == "stopped" else {}
    return {"name": name, "ranks": ranks, "model": "llama", "flags": [*words, *STRATEGIES.get(strategy, [])]} | stops


@pytest.fixture(scope="module")
def results(folder, asked_for):
    """By name, also of the single process that each case is compared with."""
    names = sorted(asked_for("name"))
    alone = [case(f"{name.partition('-')[0]}-single") for name in names]
    return runs.run_each([*alone, *(case(name, 2) for name in names)], folder)


@pytest.mark.parametrize("name", marks.cases(slow=("full-zero3", "rows-fsdp2", "rows-stopped"), matrix=CASES))
def test_new_tokens_under_a_strategy_equal_one_process(name, results):
    parity.assert_equal(results[name], results[f"{name.partition('-')[0]}-single"])


def loss_of(model, directory, output):
    settings, tokenizer = flags.load(["--recipe", str(output / "run.yaml")]), AutoTokenizer.from_pretrained(directory)
    assert tokenizer.convert_tokens_to_ids(["does", "<|tool|>"]) == [4096, 4098]
    heldout = [row for rows in prepare(settings, tokenizer).heldout.values() for row in rows]
    assert any(4096 in row["input_ids"] for row in heldout)
    return held_out_loss(model.eval(), heldout, tokenizer.pad_token_id)


@pytest.mark.parametrize("name", marks.cases(slow=("full-zero3", "rows-stopped"), matrix=("whole-fsdp2", "rows-zero3")))
def test_what_is_saved_and_merged_has_the_runs_loss(name, results, folder, tmp_path):
    """PEFT loads adapters on their base, the original model, with rows for the saved tokenizer's tokens and none beyond: these
    have at most an equal share."""
    output, expected = folder / "outputs" / name, pytest.approx(results[name]["eval_loss"][-1], rel=2e-5)
    settings = flags.load(["--recipe", str(output / "run.yaml")])
    assert loss_of(reading.read_model(settings, load_config(settings), output), output, output) == expected
    if name.startswith("rows"):
        named = json.loads((output / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert named == str(folder / "llama")
        less = results[name]["eval_loss"][-1] - loss_of(
            AutoPeftModelForCausalLM.from_pretrained(output), output, output
        )
        assert 0 < less < math.log(4160 / 4099)
    merge = [] if name.startswith("full") else ["--merge"]
    assert main(["export", str(output), str(tmp_path / "whole"), *merge]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    assert loss_of(model, tmp_path / "whole", output) == expected and model.config.vocab_size == 4160
    rows = model.get_input_embeddings().weight.detach()
    assert torch.equal(rows[4159], rows[4158]) and not torch.equal(rows[4096], rows[4159]), "only what occurs has moved"
