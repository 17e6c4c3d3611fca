"""What adapters make autograd keep: the formula against the tensors that torch saves for PEFT's own modules."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from brigade.plan.costs.job import Job
from brigade.plan.costs.layer import adapter_bytes
from brigade.plan.shape.from_config import shape_of
from brigade.plan.shape.lora import linears, targets_of, trained_parameters

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}
TOKENS, RANK = 32, 2
QV, MLP = ["q_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"]


def saved(family, layers, adapters=None, targets="all-linear", dora=False):
    """Bytes per token that a forward pass saves, each storage once, weights left out."""
    torch.manual_seed(0)
    config = family(**SIZES, num_hidden_layers=layers)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if adapters:
        lora = LoraConfig(r=RANK, target_modules=targets, use_dora=dora)
        model = get_peft_model(model, lora, autocast_adapter_dtype=adapters == "fp32")
        model.enable_input_require_grads()
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # The tensor lives on, so that no address is used twice.
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.arange(TOKENS)[None]
    half = torch.autocast("cpu", torch.bfloat16, enabled=adapters == "fp32")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), half:
        model(input_ids=ids)
    return sum(size for size, tensor in kept.values() if tensor.shape and TOKENS in tensor.shape) / TOKENS


@pytest.mark.parametrize("family", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("adapters", ["bf16", "fp32"])
@pytest.mark.parametrize("modules", ["all-linear", QV, [*QV, "k_proj", "o_proj"], MLP])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_layer_with_adapters_keeps_what_the_formula_says(family, adapters, modules, dora):
    layer = {
        kind: saved(family, 3, kind, modules, dora) - saved(family, 2, kind, modules, dora) for kind in (None, adapters)
    }
    shape, targets = shape_of(family(**SIZES).to_dict(), "config.json"), targets_of(modules)
    engine = "fsdp2" if adapters == "fp32" else "zero"
    more = adapter_bytes(Job(shape, TOKENS, method="lora", engine=engine, targets=targets, dora=dora), moe=False)
    more += 2 * RANK * len(list(linears(shape, targets)))
    assert layer[adapters] - layer[None] == pytest.approx(more, abs=(0.013 if dora else 0.01) * layer[None])


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("modules", ["all-linear", QV])
def test_what_is_trained_is_counted(modules, dora):
    config = LlamaConfig(**SIZES, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(r=RANK, target_modules=modules, use_dora=dora)
    trained = get_peft_model(model, lora).get_nb_trainable_parameters()[0]
    shape = shape_of(config.to_dict(), "config.json")
    assert trained_parameters(shape, RANK, (), targets_of(modules), dora) == trained
