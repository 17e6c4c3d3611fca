"""Models that a strategy cannot train are refused by name, before anything is built."""

from types import SimpleNamespace

import pytest
from transformers import CONFIG_MAPPING

from brigade.train.recipe import flags
from brigade.train.step.preflight import check_strategy
from brigade.train.strategy.axes import Axes


def run(kind, axes):
    strategy = SimpleNamespace(kind=kind, axes=axes, source="the strategy", place=lambda axis: axis, fsdp={})
    return SimpleNamespace(settings=flags.load([]), strategy=strategy, kernels=SimpleNamespace(attention="sdpa"))


@pytest.mark.parametrize("model, kind, axes, said", [
    ("deepseek_v4", "ddp", Axes(), "compressors get no gradient"),
    ("gemma3n_text", "zero3", Axes(), "correction_coefs"),
    ("gemma3n_text", "fsdp2", Axes(sequence=2), "not finite"),
])  # fmt: skip
def test_a_strategy_that_a_model_does_not_train_with(model, kind, axes, said, mistake):
    assert said in mistake(lambda: check_strategy(run(kind, axes), CONFIG_MAPPING[model]()))


@pytest.mark.parametrize("model, kind", [("deepseek_v4", "fsdp2"), ("gemma3n_text", "fsdp2"), ("qwen3", "ddp")])
def test_and_others_are_not_refused(model, kind):
    check_strategy(run(kind, Axes()), CONFIG_MAPPING[model]())
