"""The gradients of Table 1 against autograd, and their correlations against closed forms and quadrature."""

from __future__ import annotations

import itertools
import math
import sys

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hessinit.errors import ProblemError
from hessinit.paper import expected_correlations
from hessinit.paper.correlations import Samples, draw_samples, gather_lit, join, pearson
from hessinit.paper.scipy_extra import import_stats
from hessinit.paper.table_1 import LAYER, OUTPUTS, choose_pair

RELU = ("relu",)


def lit_images(n: int, size: int) -> Tensor:
    """Pixels from 0.1 to 1: none is cut off."""
    return 0.1 + 0.9 * torch.rand(n, size, generator=torch.Generator().manual_seed(1))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def many(
    image: Tensor, label: int, widths: list[int], n: int, seed: int, activation: str = "relu"
) -> Samples:
    """Samples that all see one image."""
    weights = generator(seed)
    labels = torch.full((500,), label)
    parts = [
        draw_samples(image.expand(500, -1), labels, widths, (activation,), weights)[activation]
        for _ in range(n // 500)
    ]
    return join(parts)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_gradients_are_those_of_autograd(activation: str) -> None:
    inputs, labels, widths = lit_images(6, 9), torch.tensor([0, 1, 2, 3, 1, 0]), [5, 7, 4]
    drawn = draw_samples(inputs, labels, widths, ("relu", "tanh"), generator(3))[activation]
    again = generator(3)
    bounds = [math.sqrt(6 / (before + after)) for before, after in itertools.pairwise([9, *widths])]
    weights = [
        torch.empty(6, before, after).uniform_(-bound, bound, generator=again).double()
        for (before, after), bound in zip(itertools.pairwise([9, *widths]), bounds, strict=True)
    ]
    function = {"relu": torch.relu, "tanh": torch.tanh}[activation]
    for sample in range(6):
        hidden = inputs[sample].double()
        for weight in weights[:-1]:
            hidden = function(hidden @ weight[sample])
        hidden = hidden.requires_grad_()
        logits = hidden @ weights[-1][sample]
        (by_layer,) = torch.autograd.grad(logits[0], hidden, retain_graph=True)
        (by_logits,) = torch.autograd.grad(F.cross_entropy(logits, labels[sample]), logits)
        assert torch.allclose(drawn.loss_by_logits[sample].double(), by_logits, atol=1e-6)
        assert drawn.weights[sample].item() == pytest.approx(by_layer[0].item(), abs=1e-7)
        assert torch.allclose(drawn.hidden[sample].double(), hidden.detach(), atol=1e-6)


def test_gradients_at_the_softmax_are_those_of_autograd() -> None:
    labels = torch.tensor([0, 1, 0, 3])
    samples = draw_samples(lit_images(4, 9), labels, [5, 4], RELU, generator(5))["relu"]
    first, derivative = choose_pair("softmax-layer", LAYER, samples)
    _, second = choose_pair("softmax-layer", OUTPUTS, samples)
    for sample in range(4):
        logits = samples.probabilities[sample].double().log().requires_grad_()
        p = logits.softmax(0)
        (by_p,) = torch.autograd.grad(-p[labels[sample]].log(), p, retain_graph=True)
        (by_logits,) = torch.autograd.grad(p[0], logits)
        assert [first[sample].item(), second[sample].item()] == pytest.approx(by_p[:2].tolist(), rel=1e-5)
        assert derivative[sample].item() == pytest.approx(by_logits[0].item(), rel=1e-5)


def test_weights_on_black_pixels_are_left_out_and_the_fan_is_not() -> None:
    image = torch.zeros(784)
    image[300:340] = lit_images(1, 40)[0]
    samples = many(image, 0, [64, 10], 4000, seed=7)
    squares = samples.hidden.double().square()
    truth = 0.5 * float(image.square().sum()) * 2 / (784 + 64)  # ReLU keeps half of the second moment
    error = float(squares.std()) / math.sqrt(squares.numel())
    assert abs(float(squares.mean()) - truth) < 4 * error
    assert error < 0.01 * truth
    variance = float(samples.weights.double().var())
    assert variance == pytest.approx(2 / (64 + 10), rel=4 * math.sqrt(0.8 / 4000))  # kurtosis of uniform: 1.8
    assert float(samples.weights.abs().max()) <= math.sqrt(6 / 74)


def test_lit_pixels_keep_their_values_and_a_black_image_one_column() -> None:
    inputs = lit_images(5, 30) * (lit_images(5, 30).flip(0) > 0.6)
    lit = gather_lit(inputs)
    assert lit.shape[1] == int((inputs != 0).sum(1).max()) < 30
    for before, after in zip(inputs, lit, strict=True):
        assert before[before != 0].tolist() == after[after != 0].tolist()
    assert gather_lit(torch.zeros(2, 3)).tolist() == [[0.0], [0.0]]


def test_with_one_image_components_correlate_by_minus_one_over_the_other_classes() -> None:
    samples = many(3 * lit_images(1, 12)[0], 2, [8, 5], 40_000, seed=11)
    r, p = pearson(*choose_pair("one-image", OUTPUTS, samples))
    assert abs(r + 1 / 4) < 4 / math.sqrt(40_000)
    assert p < 1e-100
    assert expected_correlations.between_logit_gradients(samples) == pytest.approx(-1 / 4, abs=1e-12)


def test_the_correlation_with_the_weight_is_what_quadrature_gives() -> None:
    # One pixel x, one hidden unit h = relu(v x), two classes: p₀ = sigmoid((w₀ − w₁) h).
    x, widths = 2.0, [1, 2]
    samples = many(torch.tensor([x]), 0, widths, 60_000, seed=13)
    r, _ = pearson(*choose_pair("one-image", LAYER, samples))
    nodes, masses = numpy.polynomial.legendre.leggauss(60)
    bound = math.sqrt(6 / 3)
    halves, half_masses = (nodes + 1) / 2 * math.sqrt(6 / 2), masses / 4  # v > 0 only, half of all
    v, w, u = numpy.meshgrid(halves, bound * nodes, bound * nodes, indexing="ij")
    mass = numpy.einsum("i,j,k->ijk", half_masses, masses / 2, masses / 2)
    excess = 1 / (1 + numpy.exp(-(w - u) * v * x)) - 0.5  # nothing where h = 0
    truth = (mass * excess * w).sum() / math.sqrt((mass * excess**2).sum() * bound**2 / 3)
    assert abs(r - truth) < 4 / math.sqrt(60_000)
    assert truth > 0.3
    formula = expected_correlations.with_last_weight(samples, sigma=bound / math.sqrt(3))
    assert formula == pytest.approx(truth, rel=0.15)  # Stein's identity is for normal weights


def test_the_formula_for_the_weight_is_near_for_a_wider_network_and_nothing_for_tanh() -> None:
    image, sigma, n = 0.5 * lit_images(1, 20)[0], math.sqrt(2 / 20), 40_000
    relu = many(image, 1, [10, 10], n, seed=17)
    r, p = pearson(*choose_pair("one-image", LAYER, relu))
    assert abs(r - expected_correlations.with_last_weight(relu, sigma)) < 4 / math.sqrt(n)
    assert r > 0.1
    assert p < 1e-50
    tanh = many(image, 1, [10, 10], n, seed=17, activation="tanh")
    assert abs(pearson(*choose_pair("one-image", LAYER, tanh))[0]) < 4 * 1.5 / math.sqrt(n)
    assert abs(expected_correlations.with_last_weight(tanh, sigma)) < 0.01


@pytest.mark.parametrize("variant", ["new-image", "softmax-layer"])
def test_formulas_hold_when_labels_vary(variant: str) -> None:
    n, classes = 40_000, 4
    draws, weights = generator(19), generator(23)
    inputs, labels = lit_images(n, 12), torch.randint(classes, (n,), generator=draws)
    labels[: n // 4] = 0  # classes of different sizes
    inputs[labels == 0] *= 0.8  # and of different brightness
    samples = join(
        [
            draw_samples(some, which, [8, classes], RELU, weights)["relu"]
            for some, which in zip(inputs.split(500), labels.split(500), strict=True)
        ]
    )
    logits = variant == "new-image"
    formulas = {
        OUTPUTS: expected_correlations.between_logit_gradients(samples)
        if logits
        else expected_correlations.between_probability_gradients(samples),
        LAYER: expected_correlations.with_last_weight(samples, math.sqrt(2 / 12))
        if logits
        else expected_correlations.with_softmax_derivative(samples),
    }
    for row, formula in formulas.items():
        r, _ = pearson(*choose_pair(variant, row, samples))
        assert abs(r - formula) < 4 / math.sqrt(n)
        assert abs(formula) > 6 / math.sqrt(n)  # or the line above would say nothing


def test_pearson_is_numpys_and_students() -> None:
    one = torch.rand(50, generator=generator(2))
    other = one + torch.rand(50, generator=generator(3)) * 4
    r, p = pearson(one, other)
    assert r == pytest.approx(numpy.corrcoef(one.double(), other.double())[0, 1])
    student = r * math.sqrt(48 / (1 - r * r))
    assert p == pytest.approx(2 * import_stats().t.sf(abs(student), 48))


def test_without_scipy_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ProblemError, match=r"scipy is not installed.*pip install 'hessinit\[paper\]'"):
        import_stats()
