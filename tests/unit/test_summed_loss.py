"""Models whose loss is said to take no number of tokens are tried, and believed where it does."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from brigade.train.model.summed_loss import why_not_divided


@pytest.mark.parametrize("name", ["gemma4", "qwen3"])
def test_a_loss_that_takes_the_number_is_found(name):
    assert why_not_divided(transformers.AutoConfig.for_model(name)) == ""


def test_a_loss_that_does_not_is_named(monkeypatch):
    output = SimpleNamespace(loss=torch.tensor(2.0), logits=torch.zeros(1, 16, 50))
    model = SimpleNamespace(eval=lambda: lambda **_: output)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lambda *_, **__: model)
    assert why_not_divided(transformers.AutoConfig.for_model("qwen3")) == "it takes no num_items_in_batch"
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lambda *_, **__: 1 / 0)
    assert "ZeroDivisionError" in why_not_divided(transformers.AutoConfig.for_model("qwen3"))
