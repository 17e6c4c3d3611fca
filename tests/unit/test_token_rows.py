"""Tokens whose embeddings are trained beside adapters: as PEFT does it, and refused where nobody could."""

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from brigade.errors import UserError
from brigade.plan.shape.from_config import shape_of
from brigade.plan.shape.lora import trained_parameters
from brigade.train.host.cluster import World
from brigade.train.model import adapters, token_rows
from brigade.train.model.location import load_config
from brigade.train.model.sizes import parameter_count
from brigade.train.model.tiny import shrink
from brigade.train.recipe import flags
from brigade.train.strategy import choose

TINY = json.loads((Path(__file__).resolve().parents[2] / "recipes/tiny/config.json").read_text())
TOKENS = "<|im_start|>,<|im_end|>,300"
BATCH = torch.tensor([[1, 300, 7, 4095, 300, 12], [9, 8, 2, 2, 40, 5]])


def settings_of(folder, *words, **changes):
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return flags.load(["--model_name_or_path", str(folder), "--use_peft", *words])


def loss_of(model):
    return model(input_ids=BATCH, labels=BATCH).loss


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"family": "gemma3_text"}])
def test_losses_gradients_and_what_is_merged_are_pefts(changes, tmp_path):
    """Gemma multiplies embeddings by a number of its own."""
    if family := changes.pop("family", None):
        changes = {"model_type": family, "vocab_size": 4096, "pad_token_id": 0}
        changes = shrink(CONFIG_MAPPING[family]().to_dict()) | changes
    settings = settings_of(tmp_path, "--trainable_token_indices", TOKENS, "--lora_target_modules", "q_proj", **changes)
    config = load_config(settings)
    torch.manual_seed(0)
    first = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    second = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    second.load_state_dict(first.state_dict())
    base = copy.deepcopy(first)
    adapters.check_targets(settings, config)
    ours = adapters.wrap(first, settings, "")
    ids = token_rows.token_ids(settings, 4096)
    ends = ["embed_tokens"] if config.tie_word_embeddings else ["embed_tokens", "lm_head"]
    plain = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj"], trainable_token_indices=dict.fromkeys(ends, ids))
    theirs = get_peft_model(second, plain)
    theirs.load_state_dict(ours.state_dict())
    trained = [[p for p in model.parameters() if p.requires_grad] for model in (ours, theirs)]
    for _ in range(2):  # the second begins with other rows than the base's
        losses = [loss_of(model) for model in (ours, theirs)]
        for loss, parameters in zip(losses, trained, strict=True):
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
        torch.testing.assert_close(*losses)
        for one, other in zip(*trained, strict=True):
            torch.testing.assert_close(one.grad, other.grad)
            one.data -= 0.05 * one.grad
            other.data -= 0.05 * other.grad
    after = loss_of(ours).item()
    with ours.disable_adapter():
        assert loss_of(ours).item() > after + 0.01
    ours.save_pretrained(tmp_path / "adapters")
    assert loss_of(PeftModel.from_pretrained(base, tmp_path / "adapters")).item() == pytest.approx(after, rel=1e-5)
    assert loss_of(ours.merge_and_unload()).item() == pytest.approx(after, rel=1e-5)


def test_so_few_parameters_are_trained_and_said(tmp_path):
    settings = settings_of(tmp_path, "--trainable_token_indices", TOKENS, tie_word_embeddings=False)
    model = adapters.empty_model(settings, load_config(settings))
    wrapped = adapters.wrap(model, settings, "")
    rows = 3 * 2 * TINY["hidden_size"]
    assert token_rows.count(settings.recipe.model, wrapped) == (3, rows)
    shape = shape_of(TINY | {"tie_word_embeddings": False}, "tiny")
    assert trained_parameters(shape, 16, (), tokens=3) == parameter_count(wrapped, trained=True)
    said = adapters.describe(settings.recipe.model, wrapped)["method"]
    adapted = parameter_count(wrapped, trained=True) - rows
    assert f"trains {adapted:,} in adapters + {rows:,} in the embeddings of 3 tokens" in said


@pytest.mark.parametrize("words, changes, said", [
    (["<|im_begin|>"], {}, ["has no token '<|im_begin|>'", "<|im_start|>"]),
    (["5,4096"], {}, ["token 4096 has the id 4096", "4096 tokens"]),
    (["-3"], {}, ["trainable_token_indices"]),
    (["5", "--lora_modules_to_save", "embed_tokens"], {"tie_word_embeddings": False}, ["trains embed_tokens whole already"]),
    (["0"], {}, ["token 0 is the padding"]),
])  # fmt: skip
def test_what_the_tokenizer_or_the_model_does_not_have(words, changes, said, tmp_path):
    with pytest.raises(UserError) as told:
        settings = settings_of(tmp_path, "--trainable_token_indices", *words, **changes)
        adapters.check_targets(settings, load_config(settings))
    assert all(word in str(told.value) for word in said), told.value


@pytest.mark.parametrize("words, said", [
    (["--ds_config", "ds_configs/zero1_tp2.json"], "tensor group"),
    (["--ds_config", "ds_configs/zero1_pp2.json"], "pipeline"),
    (["--tiled_loss", "true"], "tiled_loss"),
    (["--accelerate_config", "accelerate_configs/fsdp2_ep2_1x4.yaml"], "experts are divided"),
    (["--images", "true"], "images"),
    (["--objective", "reward"], "scores answers"),
    (["--sync_every", "4"], "independently"),
])  # fmt: skip
def test_where_rows_of_the_ends_cannot_be_replaced(words, said, tmp_path, mistake):
    settings = settings_of(tmp_path, "--trainable_token_indices", TOKENS, *words)
    message = mistake(choose, settings, World(0, 0, 2, 2, "host", "torchrun"), env={})
    assert said in message and "trainable_token_indices" in message
