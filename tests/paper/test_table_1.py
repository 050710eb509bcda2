"""Table 1: gradients against autograd, correlations against closed forms and quadrature, and findings."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hessinit.errors import ProblemError
from hessinit.jobs import Job
from hessinit_paper import table_1
from hessinit_paper.experiments import PaperSetting, find_experiment, reproduce, run_job
from hessinit_paper.table_1 import LAYER, OUTPUTS, Samples, choose_pair, draw_samples, expect, pearson

EXPERIMENT = find_experiment("table-1")


def lit_images(n: int, size: int) -> Tensor:
    """Pixels from 0.1 to 1: none is cut off."""
    return 0.1 + 0.9 * torch.rand(n, size, generator=torch.Generator().manual_seed(1))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def join(parts: list[Samples]) -> Samples:
    return Samples(*map(torch.cat, zip(*parts, strict=True)))


def many(image: Tensor, label: int, widths: list[int], n: int, seed: int, kind: str = "relu") -> Samples:
    """Samples that all see one image."""
    weights, labels = generator(seed), torch.full((500,), label)
    return join([draw_samples(image.expand(500, -1), labels, widths, weights)[kind] for _ in range(n // 500)])


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_gradients_are_those_of_autograd(activation: str) -> None:
    inputs, labels, widths = lit_images(6, 9), torch.tensor([0, 1, 2, 3, 1, 0]), [5, 7, 4]
    drawn = draw_samples(inputs, labels, widths, generator(3))[activation]
    again, fans = generator(3), list(itertools.pairwise([9, *widths]))
    weights = [
        torch.empty(6, before, after).uniform_(-bound, bound, generator=again).double()
        for before, after in fans
        for bound in [math.sqrt(6 / (before + after))]
    ]
    function = {"relu": torch.relu, "tanh": torch.tanh}[activation]
    first, second = choose_pair("one-image", OUTPUTS, drawn)
    for sample in range(6):
        hidden = inputs[sample].double()
        for weight in weights[:-1]:
            hidden = function(hidden @ weight[sample])
        hidden = hidden.requires_grad_()
        logits = hidden @ weights[-1][sample]
        (by_layer,) = torch.autograd.grad(logits[0], hidden, retain_graph=True)
        (by_logits,) = torch.autograd.grad(F.cross_entropy(logits, labels[sample]), logits)
        pair = [first[sample].item(), second[sample].item()]
        assert pair == pytest.approx(by_logits[:2].tolist(), abs=1e-6)
        assert drawn.weights[sample].item() == pytest.approx(by_layer[0].item(), abs=1e-7)
        assert torch.allclose(drawn.hidden[sample].double(), hidden.detach(), atol=1e-6)


def test_with_one_image_components_correlate_by_minus_one_over_the_other_classes() -> None:
    samples = many(3 * lit_images(1, 12)[0], 2, [8, 5], 40_000, seed=11)
    r, p = pearson(*choose_pair("one-image", OUTPUTS, samples))
    assert abs(r + 1 / 4) < 4 / math.sqrt(40_000)
    assert p < 1e-100
    assert expect("one-image", OUTPUTS, samples) == pytest.approx(-1 / 4, abs=1e-12)


def test_the_correlation_with_the_weight_is_what_quadrature_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    # One pixel x, one hidden unit h = relu(v x), two classes: p₀ = sigmoid((w₀ − w₁) h).
    x = 2.0
    samples = many(torch.tensor([x]), 0, [1, 2], 60_000, seed=13)
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
    monkeypatch.setattr(table_1, "DESIGN", table_1.Design(hidden=(1,), classes=2))
    # Stein's identity is for normal weights.
    assert expect("one-image", LAYER, samples) == pytest.approx(truth, rel=0.15)


@pytest.mark.parametrize("variant", ["new-image", "softmax-layer"])
def test_formulas_hold_when_labels_vary(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n, classes = 40_000, 4
    monkeypatch.setattr(table_1, "DESIGN", table_1.Design(hidden=(8,), classes=classes))
    inputs, labels = lit_images(n, 12), torch.randint(classes, (n,), generator=generator(19))
    labels[: n // 4] = 0  # classes of different sizes
    inputs[labels == 0] *= 0.8  # and of different brightness
    weights, pieces = generator(23), zip(inputs.split(500), labels.split(500), strict=True)
    samples = join([draw_samples(some, which, [8, classes], weights)["relu"] for some, which in pieces])
    for row in (OUTPUTS, LAYER):
        formula = expect(variant, row, samples)
        assert abs(pearson(*choose_pair(variant, row, samples))[0] - formula) < 4 / math.sqrt(n)
        assert abs(formula) > 6 / math.sqrt(n)  # or the line above would say nothing


def test_without_scipy_the_way_out_is_named_before_any_work(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ProblemError, match=r"scipy is not installed.*pip install 'hessinit\[paper\]'"):
        reproduce("table-1", data="digits", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []  # a folder begun without scipy would be refused once it is there


# Seed 0 of "loss by outputs" on the digits, as recorded before: r and the prediction.
RECORDED = {
    "one-image": (-0.1152467, -0.1111111),
    "new-image": (-0.1149337, -0.1123131),
    "softmax-layer": (-0.09668891, -0.09701532),
}


@pytest.mark.parametrize("variant", RECORDED)
def test_a_job_gives_the_recorded_numbers(variant: str) -> None:
    setting = PaperSetting("table-1", "digits", variant, (0,))
    job = EXPERIMENT.plan(setting)[0]
    found = run_job(Job(job.key, (setting, job.parameters)))["value"]
    relu = found["relu"]
    assert (relu["r"], relu["expected r"]) == pytest.approx(RECORDED[variant], rel=1e-5)
