"""Norms in float64, and clipping by them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brigade.train.engines.gradient_clipping import clip_, global_norm

shapes = st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple), min_size=1, max_size=5)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def random_tensors(shapes, seed, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in shapes]


def norm_by_numpy(tensors):
    return np.sqrt(sum((tensor.double().numpy() ** 2).sum() for tensor in tensors))


def with_gradients(gradients):
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


@given(shapes, st.integers(0, 1000), st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e25]), dtypes)
def test_norm_is_numpys_in_float64(shapes, seed, scale, dtype):
    tensors = random_tensors(shapes, seed, scale if dtype != torch.float16 else min(scale, 1e3), dtype)
    norm = global_norm(tensors)
    assert norm.dtype == torch.float64 and norm.ndim == 0
    assert norm.item() == pytest.approx(norm_by_numpy(tensors), rel=1e-12, abs=0)


def test_norm_of_many_elements():
    # In fp32 a CPU adds up this many squares one after another, and is off by 1e-5 and more.
    # Several chunks and the rest of one; and a view whose elements do not lie one behind the other.
    tensor = torch.full((3000, 1000), 1.1e-3)
    tensor[-1] = 7.0
    assert global_norm([tensor.t()]).item() == pytest.approx(norm_by_numpy([tensor]), rel=1e-10)
    assert global_norm([tensor]).item() == pytest.approx(norm_by_numpy([tensor]), rel=1e-10)


def test_norm_of_nothing_and_of_what_is_not_finite():
    assert global_norm([]).item() == 0
    assert global_norm([torch.tensor([1.0, float("inf")])]).isinf()
    assert global_norm([torch.tensor([1.0, float("nan")])]).isnan()


@given(shapes, st.integers(0, 1000), st.sampled_from([1e-3, 0.1, 1.0, 100.0]))
def test_clipping_is_torchs(shapes, seed, max_norm):
    gradients = random_tensors(shapes, seed)
    ours, theirs = with_gradients(gradients), with_gradients(gradients)
    norm = clip_(iter(ours), max_norm)  # as model.parameters() gives them
    their_norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert norm.item() == pytest.approx(their_norm.item(), rel=1e-5)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.grad, their.grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("max_norm", [0, 1e6])
def test_gradients_stay_bit_for_bit_where_nothing_is_to_be_clipped(max_norm):
    gradients = random_tensors([(20, 3), (7,)], 1)
    parameters = with_gradients(gradients)
    assert clip_(parameters, max_norm).item() == pytest.approx(norm_by_numpy(gradients), rel=1e-12)
    assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(parameters, gradients, strict=True))


def test_parameters_without_a_gradient_are_left_out():
    frozen, trained = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    trained.grad = torch.full((3,), 2.0)
    assert clip_([frozen, trained], 1.0).item() == pytest.approx(12**0.5)
    assert frozen.grad is None
    assert clip_([frozen], 1.0).item() == 0
