"""The training loop against one written out by hand, bit for bit."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from hessinit.paper.experiment import Setting
from hessinit.paper.minibatches import ImageSet, images_of
from hessinit.paper.networks import dense, glorot_, lenet
from hessinit.paper.training import Recipe, chunk_length, chunk_means, chunk_middles, final_loss, train

RECIPE = Recipe(learning_rate=0.1, batch=100, epochs=2, last=10)
LOSS = nn.functional.cross_entropy


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def digits() -> ImageSet:
    return images_of(Setting("table-4", "digits", "two-hidden", (0,)))


def by_hand(model: nn.Module, images: ImageSet, flat: bool) -> list[float]:
    """Two epochs of 17 full batches of 100, each in its own order; w ← w − lr · gradient."""
    source, weights, losses = seeded(5), list(model.parameters()), []
    for _ in range(2):
        order = torch.randperm(1797, generator=source)
        for number in range(17):
            index = order[100 * number : 100 * number + 100]
            inputs = images.pixels[index].float() / 16
            inputs = inputs.flatten(1) if flat else inputs
            if not flat:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            value = LOSS(model(inputs), images.labels[index])
            losses.append(value.item())
            with torch.no_grad():
                for weight, gradient in zip(weights, torch.autograd.grad(value, weights), strict=True):
                    weight.sub_(gradient, alpha=0.1)
    return losses


def test_training_is_plain_gradient_descent_bit_for_bit() -> None:
    ours = dense([64, 16, 10], "relu")
    glorot_(ours, seeded())
    theirs = copy.deepcopy(ours)
    losses = train(ours, LOSS, digits(), RECIPE, seeded(5), flat=True)
    assert losses == by_hand(theirs, digits(), flat=True)
    assert len(losses) == RECIPE.steps(1797) == 34
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_convolutions_are_trained_bit_for_bit_too() -> None:
    ours = lenet((1, 8, 8), pool="max", activation="relu")
    glorot_(ours, seeded())
    theirs = copy.deepcopy(ours).to(memory_format=torch.channels_last)
    losses = train(ours, LOSS, digits(), RECIPE, seeded(5), flat=False)
    assert losses == by_hand(theirs, digits(), flat=False)
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_loss_that_is_not_finite_ends_the_training_and_is_its_result() -> None:
    model = dense([64, 16, 10], "relu")
    glorot_(model, seeded())
    calls = 0

    def breaks_at_the_third(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return LOSS(outputs, targets) * (math.inf if calls == 3 else 1)

    losses = train(model, breaks_at_the_third, digits(), RECIPE, seeded(5), flat=True)
    assert losses[2:] == [math.inf]
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert final_loss(losses, last=10) == math.inf


def test_the_training_loss_is_the_mean_of_the_last_ones() -> None:
    assert final_loss([9.0, 5.0, 1.0, 3.0], last=3) == 3.0
    assert math.isnan(final_loss([9.0, math.nan], last=2))


@pytest.mark.parametrize("steps", [1, 59, 60, 61, 780, 3750])
def test_a_curve_has_at_most_60_points_and_keeps_the_mean(steps: int) -> None:
    losses = torch.rand(steps, generator=seeded(), dtype=torch.float64).tolist()
    length = chunk_length(steps)
    means, middles = chunk_means(losses, length), chunk_middles(steps, length)
    assert len(means) == len(middles) <= 60
    assert min(steps, 30) <= len(means)
    sizes = [length] * (steps // length) + ([steps % length] if steps % length else [])
    whole = sum(mean * size for mean, size in zip(means, sizes, strict=True))
    assert whole == pytest.approx(sum(losses), rel=1e-12)
    assert means[0] == pytest.approx(sum(losses[:length]) / length, rel=1e-12)
