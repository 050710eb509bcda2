"""Skip-gram: scores, losses and gradients by hand, and its curvature against dense fp64 autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

from hessinit.measurement.measure import measure
from hessinit.paper.skip_gram import MODELS, SkipGram, normal_

VOCABULARY, DIMENSION, PAIRS, NEGATIVES = 7, 3, 9, 2
WEIGHTS = ("centre.weight", "context.weight")


def tiny(kind: str, std: float) -> tuple[SkipGram, tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(3)
    model = MODELS[kind](VOCABULARY, DIMENSION).double()
    normal_(model, std, random)
    words = torch.randint(VOCABULARY, (PAIRS, 2 + NEGATIVES), generator=random)
    if kind == "softmax":
        return model, (words[:, 0], words[:, 1])
    labels = torch.zeros(PAIRS, 1 + NEGATIVES, dtype=torch.float64)
    labels[:, 0] = 1
    return model, (words, labels)


def softmax_by_hand(centre, context, words, targets):
    gradients = [np.zeros_like(centre), np.zeros_like(context)]
    total = 0.0
    for word, target in zip(words, targets, strict=True):
        scores = context @ centre[word]
        shares = np.exp(scores) / np.exp(scores).sum()
        total -= np.log(shares[target])
        shares[target] -= 1
        gradients[0][word] += context.T @ shares
        gradients[1] += np.outer(shares, centre[word])
    return total / len(words), [gradient / len(words) for gradient in gradients]


def negative_by_hand(centre, context, words, labels):
    gradients = [np.zeros_like(centre), np.zeros_like(context)]
    total = 0.0
    for row in words:
        for place, other in enumerate(row[1:]):
            sign = 1 if place == 0 else -1
            score = context[other] @ centre[row[0]]
            total += np.log1p(np.exp(-sign * score))
            slope = -sign / (1 + np.exp(sign * score))
            gradients[0][row[0]] += slope * context[other]
            gradients[1][other] += slope * centre[row[0]]
    return total / len(words), [gradient / len(words) for gradient in gradients]


BY_HAND = {"softmax": softmax_by_hand, "negative": negative_by_hand}


@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients_are_those_of_the_formula(kind):
    model, (words, targets) = tiny(kind, std=0.8)
    loss = model.loss(model(words), targets)
    found = torch.autograd.grad(loss, [model.centre.weight, model.context.weight])
    weights = [model.get_parameter(name).detach().numpy() for name in WEIGHTS]
    expected, gradients = BY_HAND[kind](*weights, words.numpy(), targets.numpy())
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    for ours, by_hand in zip(found, gradients, strict=True):
        np.testing.assert_allclose(ours.numpy(), by_hand, rtol=1e-10, atol=1e-14)


def dense_hessian(model, words, targets):
    """The exact Hessian and Gauss-Newton of both weights together, written out."""
    weights = {name: model.get_parameter(name).detach() for name in WEIGHTS}
    sizes = [weight.numel() for weight in weights.values()]

    def scores(flat):
        parts = flat.split(sizes)
        named = {name: part.view(VOCABULARY, DIMENSION) for name, part in zip(WEIGHTS, parts, strict=True)}
        return functional_call(model, named, (words,))

    flat = torch.cat([weight.flatten() for weight in weights.values()])
    exact = hessian(lambda at: model.loss(scores(at), targets), flat)
    output = scores(flat)
    outer = hessian(lambda z: model.loss(z, targets), output).reshape(output.numel(), output.numel())
    slopes = jacobian(scores, flat).reshape(output.numel(), len(flat))
    return exact, slopes.T @ outer @ slopes, sizes[0]


def norm(matrix):
    return torch.linalg.eigvalsh(matrix).abs().max().item()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("std", [0.05, 1.0])
def test_measured_norms_are_those_of_the_dense_hessian(kind, std):
    model, batch = tiny(kind, std)
    exact, approximation, border = dense_hessian(model, *batch)
    report = measure(model, model.loss, batch, curvature="both", tolerance=1e-6)
    assert report["centre"].norm == pytest.approx(norm(exact[:border, :border]), rel=1e-5)
    assert report["context"].norm == pytest.approx(norm(exact[border:, border:]), rel=1e-5)
    assert report.network.norm == pytest.approx(norm(exact), rel=1e-5)
    assert report.network.approximation.value == pytest.approx(norm(approximation), rel=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_gauss_newton_is_exact_within_a_matrix_and_not_between_them(kind):
    model, batch = tiny(kind, std=0.05)
    exact, approximation, border = dense_hessian(model, *batch)
    for block in (slice(None, border), slice(border, None)):
        torch.testing.assert_close(exact[block, block], approximation[block, block], rtol=1e-9, atol=1e-15)
    between = exact[:border, border:]
    assert norm(exact) > 5 * norm(approximation)
    assert torch.linalg.matrix_norm(between, 2).item() == pytest.approx(norm(exact), rel=0.1)


def test_weights_are_drawn_with_the_given_spread_and_the_two_differ():
    model = MODELS["negative"](4000, 8)
    normal_(model, 0.03, torch.Generator().manual_seed(0))
    for name in WEIGHTS:
        assert model.get_parameter(name).detach().std().item() == pytest.approx(0.03, rel=0.02)
    mixed = torch.stack([model.get_parameter(name).detach().flatten() for name in WEIGHTS])
    assert abs(torch.corrcoef(mixed)[0, 1].item()) < 0.03


def test_building_draws_nothing_from_the_global_generator():
    before = torch.get_rng_state()
    MODELS["softmax"](5, 2)
    assert torch.equal(before, torch.get_rng_state())
