"""Models whose loss is said to take no number of tokens are tried, and believed where it does."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from brigade.train.loss.own_loss import is_doubtful, why_not_divided
from brigade.train.model.tiny import shrink


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


@pytest.mark.parametrize(
    "name, doubtful", [("qwen3", False), ("gemma3_text", False), ("cpmant", True), ("trocr", True)]
)
def test_a_forward_pass_with_a_loss_of_its_own_is_tried_whatever_its_signature_says(name, doubtful):
    """Theirs takes any keyword, and is a mean: accumulation changed the loss of CPM-Ant by a factor of 4."""
    config = transformers.CONFIG_MAPPING[name].from_dict(shrink(transformers.CONFIG_MAPPING[name]().to_dict()))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert is_doubtful(model, says=True) == doubtful
    assert bool(why_not_divided(config)) == doubtful
