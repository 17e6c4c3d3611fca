"""Muon: the steps of torch's optimizers, whichever rank computes them, and which parameters are matrices."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from brigade.train.engines.matrix_rounds import divide, rounds
from brigade.train.engines.muon import ADJUSTMENTS, MATRIX, Muon, matrices_of
from brigade.train.engines.shares import shares_of
from brigade.train.model.tiny import shrink
from brigade.train.step.optimizers import parse_arguments


def model_of(kind: str, **changed):
    config = shrink(CONFIG_MAPPING[kind]().to_dict(), 1, 2) | changed
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind].from_dict(config), dtype=torch.float32)


def optimizer_of(model, **options):
    matrices = matrices_of(model)
    named = dict(model.named_parameters())
    groups = [
        {"params": [parameter for name, parameter in named.items() if name not in matrices]},
        {"params": [named[name] for name in matrices], MATRIX: True},
    ]
    optimizer = Muon(groups, lr=1e-2, weight_decay=0.1, **options)
    optimizer.divide_matrices(model, shares_of(model), torch.device("cpu"))
    return optimizer


def learn(model, *optimizers, steps=4):
    """Losses of some steps on the same tokens."""
    tokens = torch.arange(48).view(2, 24) % model.config.vocab_size
    losses = []
    for _ in range(steps):
        loss = model.train()(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
def test_one_process_steps_as_torchs_optimizers_do_bit_for_bit(adjust):
    plain, ours = model_of("llama"), model_of("llama")
    named, found = dict(plain.named_parameters()), matrices_of(plain)
    matrices, others = [named[name] for name in found], [each for name, each in named.items() if name not in found]
    both = {"lr": 1e-2, "weight_decay": 0.1}
    torchs = [
        torch.optim.Muon(matrices, **both, adjust_lr_fn=adjust),
        torch.optim.AdamW(others, **both, betas=(0.9, 0.95), fused=True),
    ]
    losses = learn(plain, *torchs)
    assert learn(ours, optimizer_of(ours, adjust_lr_fn=adjust)) == losses and losses[-1] < 0.9 * losses[0]
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))


def test_each_expert_is_a_matrix():
    model = model_of("qwen3_moe")
    optimizer = optimizer_of(model)
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    before = experts.detach().clone()
    learn(model, optimizer, steps=1)
    model.zero_grad()
    again = model_of("qwen3_moe")
    tokens = torch.arange(48).view(2, 24) % model.config.vocab_size
    again.train()(input_ids=tokens, labels=tokens).loss.backward()
    gradient = again.model.layers[0].mlp.experts.gate_up_proj.grad
    for each, start, moved in zip(gradient, before, experts.detach(), strict=True):
        matrix = torch.nn.Parameter(start.clone())
        matrix.grad = each
        torch.optim.Muon([matrix], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
        assert torch.equal(matrix, moved)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_head_and_vectors_are_left_to_adamw(tied):
    model = model_of("qwen3_moe", tie_word_embeddings=tied)
    found = matrices_of(model)
    wanted = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    wanted |= {"mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert {name.rpartition("layers.0.")[2] for name in found if ".0." in name} == wanted
    assert all(name.startswith("model.layers.") for name in found)


def test_convolutions_and_states_are_none():
    model = model_of("mamba")
    assert not [name for name in matrices_of(model) if "conv1d" in name or "A_log" in name]
    assert any("in_proj" in name for name in matrices_of(model))


# ---- which rank has which matrix -------------------------------------------------------------------------------------
shapes = st.lists(
    st.tuples(st.integers(2, 6), st.integers(2, 6)) | st.tuples(*[st.integers(2, 4)] * 3), min_size=1, max_size=6
)


def cut(shapes, ranks, how):
    """What each rank holds of each parameter: all (ddp), rows (fsdp2), or a slice of all laid end to end (zero1)."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if how == "ddp":
        return [[[(0, size)] for size in sizes] for _ in range(ranks)]
    if how == "fsdp2":
        ends = []
        for shape, size in zip(shapes, sizes, strict=True):
            share = -(-shape[0] // ranks) * size // shape[0]
            ends.append([min(rank * share, size) for rank in range(ranks + 1)])
        pairs = [[(end[rank], end[rank + 1]) for end in ends] for rank in range(ranks)]
        return [[[pair] if pair[0] < pair[1] else [] for pair in of_rank] for of_rank in pairs]
    share, edges = -(-sum(sizes) // ranks), [0, *itertools.accumulate(sizes)]
    slices = [(rank * share, (rank + 1) * share) for rank in range(ranks)]
    return [
        [
            [(max(a, first) - a, min(b, last) - a)] if max(a, first) < min(b, last) else []
            for a, b in itertools.pairwise(edges)
        ]
        for first, last in slices
    ]


@given(shapes, st.integers(1, 5), st.sampled_from(["ddp", "fsdp2", "zero1"]))
def test_every_matrix_has_one_owner_and_one_round(shapes, ranks, how):
    matrices = divide(shapes, cut(shapes, ranks, how))
    assert sum(matrix.size for matrix in matrices) == sum(torch.Size(shape).numel() for shape in shapes)
    assert sorted(map(id, itertools.chain(*rounds(matrices, ranks)))) == sorted(map(id, matrices))
    for matrix in matrices:
        held = [sum(stop - start for (start, stop), who in matrix.held if rank in who) for rank in range(ranks)]
        assert held[matrix.owner] == max(held)
    for each in rounds(matrices, ranks):
        for rank in range(ranks):
            assert sum(m.size for m in each if m.owner == rank) <= max(m.size for m in matrices)


def test_under_ddp_ranks_have_equal_work():
    matrices = divide([(64, 64)] * 12, cut([(64, 64)] * 12, 4, "ddp"))
    assert [sum(matrix.owner == rank for matrix in matrices) for rank in range(4)] == [3] * 4
    assert len(rounds(matrices, 4)) == 3


def test_parts_that_do_not_fit_together_are_told():
    with pytest.raises(RuntimeError, match="do not fit together"):
        divide([(4, 4)], [[[(0, 8)]], [[(9, 16)]]])


# ---- arguments -------------------------------------------------------------------------------------------------------
def test_arguments_have_torchs_names(user_error):
    found = parse_arguments("muon", "momentum=0.9,nesterov=false,ns_steps=6,adjust_lr_fn=original", "optim_args")
    assert found == {"momentum": 0.9, "nesterov": False, "ns_steps": 6, "adjust_lr_fn": "original"}
    for wrong, words in (("momentun=0.9", "momentum"), ("adjust_lr_fn=mine", "match_rms_adamw, original")):
        assert words in user_error(parse_arguments, "muon", wrong, "optim_args").cure


@pytest.mark.parametrize("optim", ["sgd", "lamb", "lars", "muon"])
def test_an_argument_that_the_recipe_has_a_key_for_is_refused(optim, user_error):
    """Groups of parameters have the recipe's weight_decay, and an argument would not change it."""
    for argument, key in (
        ("weight_decay=0.5", "set the recipe's weight_decay"),
        ("lr=1", "set the recipe's learning_rate"),
    ):
        assert key in user_error(parse_arguments, optim, argument, "optim_args").cure


def test_a_step_without_a_division_is_told():
    model = model_of("llama")
    optimizer = Muon([{"params": [model.model.layers[0].mlp.up_proj.weight], MATRIX: True}], lr=1e-2)
    with pytest.raises(RuntimeError, match="divide_matrices"):
        optimizer.step()
