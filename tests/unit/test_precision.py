"""What engines compute in half precision, and what they leave in fp32."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

from brigade.train.distributed import heartbeat
from brigade.train.distributed.process import this_process
from brigade.train.engines.fsdp2_engine import precision
from brigade.train.step.saved_model import Moving

TOKENS = torch.arange(64).view(2, 32)


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=128, **sizes), dtype=torch.float32)


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_under_fsdp2_layers_hand_on_half_precision_and_the_loss_is_in_fp32(half, one_rank):
    """With an output_dtype each layer's output was cast to fp32, and back by the next: the same numbers in twice the bytes."""

    def trained(policy):
        model, between = llama(), []
        units = (*model.model.layers, model.model.embed_tokens, [model.model.norm, model.lm_head], model)
        for unit in units:  # as accelerate divides a model (utils/fsdp_utils.py: fsdp2_prepare_model)
            fully_shard(unit, mesh=one_rank, mp_policy=policy)
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _, __, output: between.append(output.dtype))
        with torch.autocast("cpu", half):  # as accelerate does around the whole model
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        return loss, [parameter.grad.full_tensor() for parameter in model.parameters()], between

    loss, gradients, between = trained(precision(half))
    assert between == [half] * 3 and loss.dtype == torch.float32
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    before, gradients_before, between = trained(replace(precision(half), output_dtype=torch.float32))
    assert between == [torch.float32] * 3
    assert torch.equal(loss, before) and all(map(torch.equal, gradients, gradients_before))


def test_while_weights_are_gathered_a_save_is_seen_to_move(one_rank):
    """No byte of a file is written meanwhile, and the largest models are gathered for longer than a silence may last."""
    model = llama()
    fully_shard(model, mesh=one_rank)
    before = this_process.heartbeat.page[heartbeat.BEATS]
    with Moving():
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert this_process.heartbeat.page[heartbeat.BEATS] - before >= len(whole) == len(model.state_dict())
    assert all(not isinstance(tensor, DTensor) for tensor in whole.values())
    this_process.heartbeat.end()
