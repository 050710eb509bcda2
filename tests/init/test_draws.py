"""Draws: their laws, their orthogonality, generators, precisions and parts of parameters."""

from __future__ import annotations

import math

import pytest
import torch
from networks import seeded
from scipy.stats import kstest, norm, truncnorm, uniform
from torch import nn

from hessinit.init.draws import DISTRIBUTIONS, TRUNCATED_STD, draw_, draw_delta_orthogonal_, draw_orthogonal_

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


BY_NAME = lambda name: lambda view, generator=None: draw_(view, 0.3, name, generator)  # noqa: E731
DRAWS = {
    **{name: BY_NAME(name) for name in DISTRIBUTIONS},
    "orthogonal": lambda view, generator=None: draw_orthogonal_(view, 0.3, generator),
    "delta-orthogonal": lambda view, generator=None: draw_delta_orthogonal_(view, 0.3, generator),
}

EDGE = 2 / TRUNCATED_STD
LAWS = {  # of unit standard deviation: the law, its kurtosis, its end
    "normal": (norm(), 3.0, math.inf),
    "truncated normal": (truncnorm(-2, 2, scale=1 / TRUNCATED_STD), None, EDGE),
    "uniform": (uniform(-math.sqrt(3), 2 * math.sqrt(3)), 1.8, math.sqrt(3)),
}


@pytest.mark.parametrize("std", [0.02, 5.0])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_block_has_the_law_asked_for(distribution, std):
    law, kurtosis, end = LAWS[distribution]
    assert truncnorm(-2, 2).std() == pytest.approx(TRUNCATED_STD, rel=1e-12)
    block = torch.empty(1000, 1000, dtype=torch.float64)
    draw_(block, std, distribution, seeded())
    unit = block.flatten() / std
    if kurtosis is None:
        kurtosis = float(law.stats("k")) + 3
    assert abs(unit.mean()) < 4e-3  # four standard errors
    assert abs(unit.square().mean() - 1) < 4 * math.sqrt((kurtosis - 1) / 1e6)
    assert abs(unit.pow(4).mean() - kurtosis) < 0.04  # 3, 2.37 or 1.8: tells them apart
    assert 0.99 * min(end, 4) < unit.abs().max() <= end * (1 + 1e-12)
    assert kstest(unit[:20_000].numpy(), law.cdf).pvalue > 1e-3


@pytest.mark.parametrize("kind", DRAWS)
def test_seeds_and_generators(kind):
    first, again, other = (torch.empty(40, 30, 3) for _ in range(3))
    for block, seed in ((first, 1), (again, 1), (other, 2)):
        DRAWS[kind](block, seeded(seed))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(5)
    before, generator = torch.get_rng_state(), seeded()
    DRAWS[kind](first, generator)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(generator.get_state(), seeded().get_state())
    DRAWS[kind](first)  # from the global generator
    assert not torch.equal(torch.get_rng_state(), before)
    DRAWS[kind](again, seeded(5))
    assert torch.equal(first, again)


@pytest.mark.parametrize("kind", DRAWS)
def test_a_part_of_a_parameter_is_filled_in_place_and_the_rest_unchanged(kind):
    parameter = nn.Parameter(torch.full((12, 8), 9.0))
    storage = parameter.data_ptr()
    for part in (parameter.split(4)[1], parameter[:4].T, parameter[8::2]):
        DRAWS[kind](part, seeded())
        assert not (part == 9).any()
    assert (parameter[9::2] == 9).all()
    assert (parameter.data_ptr(), parameter.is_leaf, parameter.grad) == (storage, True, None)
    expected = torch.empty(8, 4)
    DRAWS[kind](expected, seeded())
    assert torch.equal(parameter[:4], expected.T)
    (parameter.square().sum()).backward()  # the parameter can still be trained
    assert torch.equal(parameter.grad, 2 * parameter)


@pytest.mark.parametrize("kind", DRAWS)
def test_the_callers_settings_do_not_reach_the_numbers(kind):
    for setting in (torch.inference_mode(), torch.device("meta")):
        plain, block = torch.empty(6, 5), nn.Parameter(torch.empty(6, 5))
        DRAWS[kind](plain, seeded())
        with setting:
            DRAWS[kind](block, seeded())
        assert torch.equal(plain, block)


SHAPES = [(16, 64), (64, 16), (32, 32), (64, 3, 5, 5), (8, 16, 3), (1, 7), (7, 1)]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_shorter_side_of_an_orthogonal_block_is_orthonormal(shape, dtype, near):
    weight = torch.empty(shape, dtype=dtype)
    draw_orthogonal_(weight, 1.5, seeded())
    matrix = weight.double().flatten(1) / 1.5
    product = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    assert torch.allclose(product, torch.eye(len(product), dtype=torch.float64), rtol=0, atol=near)


def test_orthogonal_matrices_are_uniform():
    # Without the fix of signs, LAPACK's Q has a negative first entry always, and a trace far from 0.
    generator = seeded()
    matrices = torch.empty(4000, 3, 3, dtype=torch.float64)
    for matrix in matrices:
        draw_orthogonal_(matrix, 1.0, generator)
    assert matrices.mean(0).abs().max() < 4 / math.sqrt(3 * 4000)
    assert (matrices.square().mean(0) - 1 / 3).abs().max() < 4 * math.sqrt(4 / 45 / 4000)
    traces = matrices.diagonal(dim1=1, dim2=2).sum(1)
    assert abs(traces.square().mean() - 1) < 0.1  # E (tr Q)² = 1 for Haar (Diaconis and Shahshahani)
    assert abs((torch.linalg.det(matrices) > 0).double().mean() - 0.5) < 4 / math.sqrt(4 * 4000)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_delta_orthogonal_convolution_keeps_the_norm_of_its_input(dtype):
    layer = nn.Conv2d(6, 10, (3, 5), padding=(1, 2), padding_mode="circular", bias=False).to(dtype)
    draw_delta_orthogonal_(layer.weight, 1.0, seeded())
    inputs = torch.randn(4, 6, 9, 11, generator=seeded(1), dtype=torch.float64)
    outputs = layer.double()(inputs)
    ratios = outputs.flatten(1).norm(dim=1) / inputs.flatten(1).norm(dim=1)
    assert (ratios - 1).abs().max() < (1e-10 if dtype == torch.float64 else 1e-2)
    # A plain orthogonal weight does not: the test can fail.
    draw_orthogonal_(layer.weight, 1.0, seeded())
    ratios = layer(inputs).flatten(1).norm(dim=1) / inputs.flatten(1).norm(dim=1)
    assert (ratios - 1).abs().max() > 0.05


def test_delta_orthogonal_is_zero_off_the_middle_and_orthogonal_without_a_kernel():
    weight = torch.full((4, 4, 3, 4), 7.0)
    draw_delta_orthogonal_(weight, 2.0, seeded())
    middle = weight[:, :, 1, 2].clone()
    assert torch.allclose(middle @ middle.T, 4 * torch.eye(4), atol=1e-5)
    weight[:, :, 1, 2] = 0
    assert not weight.any()
    delta, plain = torch.empty(5, 9), torch.empty(5, 9)
    draw_delta_orthogonal_(delta, 1.3, seeded())
    draw_orthogonal_(plain, 1.3, seeded())
    assert torch.equal(delta, plain)


@CUDA
@pytest.mark.parametrize("kind", DRAWS)
def test_a_block_on_the_gpu_gets_the_cpus_bits_from_a_generator_of_the_cpu(kind):
    here, there = torch.empty(64, 32, 3), torch.empty(64, 32, 3, device="cuda", dtype=torch.bfloat16)
    DRAWS[kind](here, seeded())
    DRAWS[kind](there, seeded())
    assert torch.equal(here.bfloat16(), there.cpu())
