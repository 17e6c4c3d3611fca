"""Llama 4's layers without rotary embeddings, whose queries are scaled by positions within samples."""

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from brigade.train.upstream.samples_end_to_end import count_within_samples

POSITIONS = torch.cat([torch.arange(13), torch.arange(27)])[None]
SIZES = {"hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_hidden_layers": 2, "head_dim": 8}


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = Llama4TextConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, vocab_size=64,
                              no_rope_layers=[1, 0], floor_scale=8, attn_scale=5.0, pad_token_id=0)  # fmt: skip
    model = Llama4ForCausalLM(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    count_within_samples(model)
    return model


def gradients(model, others):
    """Return the gradients of a row of two samples, where the forward pass of another row may come before its backward pass."""
    model.zero_grad()
    ids = torch.randint(1, 64, (1, 40), generator=torch.Generator().manual_seed(0))
    loss = model(ids, position_ids=POSITIONS, labels=ids, use_cache=False).loss
    if others:
        model(ids, position_ids=torch.arange(40)[None], use_cache=False)
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_computed_again_has_the_positions_of_its_own_row(model, reentrant):
    """As in a pipeline, whose stages go forward with several micro-batches before they go backward with the first."""
    expected = gradients(model.train(), others=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    torch.testing.assert_close(gradients(model, others=True), expected)


def test_a_cache_counts_on(model):
    ids, past = torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(0)), None
    with torch.no_grad():
        expected, parts = model.eval()(ids).logits, []
        for part in (ids[:, :15], *ids[:, 15:].split(1, dim=1)):
            found = model(part, past_key_values=past, use_cache=True)
            parts, past = [*parts, found.logits], found.past_key_values
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)
