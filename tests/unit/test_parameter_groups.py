"""Learning rates by patterns of names: which group each parameter is in, in which order, and which patterns are mistakes."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from brigade.train.engines import parameter_groups
from brigade.train.engines.muon import MATRIX

PATTERNS = '{"embed_tokens|lm_head": 1e-5, "layers\\\\.0\\\\.": 3.0e-5, "layernorm": 1}'


@pytest.fixture(scope="module")
def model():
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    )


@pytest.fixture
def trainer_of(load, model):
    """trainer_of("--optim", "muon"): what the groups of a run are made of."""

    def call(*flags):
        settings = load("--learning_rate", "1e-4", *flags)
        run = SimpleNamespace(settings=settings, batch=SimpleNamespace(learning_rate=2e-4))  # scaled with the batch
        return SimpleNamespace(run=run, engine=SimpleNamespace(whole_model=lambda _: model))

    return call


def groups_of(trainer, model):
    """Names -> (learning rate, weight decay, by Muon) of each group, as divide() makes them of Transformers' two."""
    named = dict(model.named_parameters())
    decays = [[named[name] for name in named if ("norm" in name) is norms] for norms in (False, True)]
    optimizer = torch.optim.AdamW([{"params": d, "weight_decay": w} for d, w in zip(decays, (0.1, 0.0), strict=True)])
    parameter_groups.divide(optimizer, model, trainer.run.settings.recipe.training, 2e-4)
    name_of = {id(parameter): name for name, parameter in named.items()}
    return [
        ([name_of[id(p)] for p in group["params"]], (group["lr"], group["weight_decay"], group.get(MATRIX, False)))
        for group in optimizer.param_groups
    ]


def test_the_first_pattern_that_fits_gives_the_learning_rate(trainer_of, model):
    found = groups_of(trainer_of("--learning_rates", PATTERNS), model)
    assert [about for _, about in found] == [
        (pytest.approx(2e-5), 0.1, False),
        (pytest.approx(6e-5), 0.1, False),
        (pytest.approx(6e-5), 0.0, False),
        (pytest.approx(2), 0.0, False),
        (2e-4, 0.1, False),
        (2e-4, 0.0, False),
    ]
    assert {*found[0][0]} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all("layers.0." in name for names, _ in found[1:3] for name in names)
    assert found[-1][0] == ["model.norm.weight"]


@pytest.mark.parametrize("patterns", [[], ["--learning_rates", PATTERNS]], ids=["none", "some"])
@pytest.mark.parametrize("optim", ["adamw_torch", "muon"])
def test_a_checkpoint_numbers_parameters_as_the_optimizer_does(optim, patterns, trainer_of, model):
    trainer = trainer_of("--optim", optim, *patterns)
    names = [name for name, _ in model.named_parameters()]
    names.sort(key=lambda name: "norm" in name)  # as Transformers' groups are
    stepped = [name for names, _ in groups_of(trainer, model) for name in names]
    assert parameter_groups.order(model, names, trainer.run.settings.recipe.training) == stepped


def test_a_compiled_layer_changes_no_order(trainer_of, model):
    trainer, wrapped = trainer_of("--optim", "muon", "--learning_rates", PATTERNS), copy.deepcopy(model)
    wrapped.model.layers[0] = torch.compile(wrapped.model.layers[0])
    names, training = [name for name, _ in model.named_parameters()], trainer.run.settings.recipe.training
    assert names != [name for name, _ in wrapped.named_parameters()]
    assert parameter_groups.order(wrapped, names, training) == parameter_groups.order(model, names, training)


def test_muons_matrices_are_groups_of_their_own(trainer_of, model):
    trainer = trainer_of("--optim", "muon", "--learning_rates", '{"layers\\\\.0": 1e-5}')
    found = groups_of(trainer, model)
    assert [about[2] for _, about in found] == [False, True, False, False, True]
    said = parameter_groups.describe(trainer)["parameter groups"]
    count = sum(p.numel() for n, p in model.named_parameters() if "layers.0" in n and p.ndim == 2)
    assert rf"layers\.0 {count:,} parameters at 2e-05 by Muon" in said
    assert "others 2,096 parameters at 0.0002 by AdamW" in said


def test_nothing_is_said_where_all_have_one_rate(trainer_of):
    assert parameter_groups.describe(trainer_of()) == {}


MISTAKES = {
    # name: pattern, words of the message
    "of nothing": ('{"embed_tokns": 1e-5}', ["'embed_tokns' matches no trained parameter", "embed_tokens"]),
    "behind another": ('{"embed": 1e-5, "embed_tokens": 1e-6}', ["none before it matches", "put it first"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_pattern_of_nothing_is_a_mistake(name, trainer_of, mistake):
    pattern, words = MISTAKES[name]
    said = mistake(parameter_groups.check, trainer_of("--learning_rates", pattern))
    assert "flag --learning_rates" in said and all(word in said for word in words), said


@pytest.mark.parametrize("table, words", [
    ('{"(": 1e-5}', "a table of regular expressions"),
    ('{"a": 0}', "learning rates above 0"),
    ('{"a": fast}', "above 0"),
])  # fmt: skip
def test_what_is_no_table_of_rates(table, words, load, mistake):
    said = mistake(load, "--learning_rates", table)
    assert "flag --learning_rates" in said and words in said
