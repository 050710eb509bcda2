"""Mini-batches of pairs, noise, and SGD."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from test_skip_gram import BY_HAND, WEIGHTS, tiny

from hessinit.paper.skip_gram import MODELS, normal_
from hessinit.paper.skip_gram_training import draw_batches, draw_noise, train_
from hessinit.paper.text.load import Text
from hessinit.paper.text.vocabulary import Vocabulary

COUNTS = (400, 100, 50, 25, 20, 5)


def make_text(pairs: int = 600) -> Text:
    random = np.random.default_rng(0)
    centres = random.integers(len(COUNTS), size=pairs)
    contexts = (centres + random.integers(1, 3, size=pairs)) % len(COUNTS)
    vocabulary = Vocabulary(tuple("abcdef"), COUNTS, sum(COUNTS))
    return Text("made", vocabulary, np.stack([centres, contexts], 1).astype(np.int32), 1, 600, "made")


def batches(kind: str, seed: int = 0, steps: int = 60, size: int = 10):
    return list(draw_batches(kind, make_text(), size=size, steps=steps, seed=seed, negatives=5))


def test_noise_follows_counts_to_the_power_three_quarters():
    weights = np.array(COUNTS) ** 0.75
    cumulative = torch.from_numpy(make_text().vocabulary.noise()).cumsum(0)
    drawn = draw_noise(cumulative, (20_000, 5), torch.Generator().manual_seed(1))
    found = np.bincount(drawn.flatten().numpy(), minlength=len(COUNTS))
    expected = weights / weights.sum() * found.sum()
    assert stats.chisquare(found, expected).pvalue > 1e-3
    plain = np.array(COUNTS) / sum(COUNTS) * found.sum()
    assert stats.chisquare(found, plain).pvalue < 1e-12


def test_a_number_past_the_last_sum_is_the_last_word():
    short = torch.tensor([0.0, 0.0], dtype=torch.float64)
    assert draw_noise(short, (3, 2), torch.Generator().manual_seed(0)).tolist() == [[1, 1]] * 3


def test_every_pair_is_used_once_before_any_is_used_again():
    words = torch.cat([torch.stack(batch, dim=1) for batch in batches("softmax")])
    assert sorted(words.tolist()) == sorted(make_text().pairs.tolist())
    twice = torch.cat([torch.stack(batch, dim=1) for batch in batches("softmax", steps=120)])
    assert torch.equal(twice[600:], words)


def test_both_models_see_the_same_pairs_and_negatives_come_behind():
    for (words, targets), (rows, labels) in zip(batches("softmax"), batches("negative"), strict=True):
        assert torch.equal(rows[:, :2], torch.stack([words, targets], dim=1))
        assert rows.shape == (10, 7)
        assert labels.tolist() == [[1, 0, 0, 0, 0, 0]] * 10


def test_seeds_change_order_and_noise_and_the_same_seed_does_not():
    first, again, other = (batches("negative", seed)[0][0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first[:, :2], other[:, :2])
    assert not torch.equal(first[:, 2:], other[:, 2:])


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_is_the_rate_times_the_gradient_by_hand(kind):
    model, (words, targets) = tiny(kind, std=0.8)
    before = [model.get_parameter(name).detach().clone().numpy() for name in WEIGHTS]
    expected, gradients = BY_HAND[kind](*before, words.numpy(), targets.numpy())
    assert train_(model, [(words, targets)], rate=0.7) == [pytest.approx(expected)]
    for name, old, gradient in zip(WEIGHTS, before, gradients, strict=True):
        after = model.get_parameter(name).detach().numpy()
        np.testing.assert_allclose(after, old - 0.7 * gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
def test_training_lowers_the_loss(kind):
    model = MODELS[kind](len(COUNTS), 4)
    normal_(model, 0.3, torch.Generator().manual_seed(0))
    losses = train_(model, batches(kind, steps=400), rate=1.0)
    # Two contexts follow each word with equal chances: no model can tell them apart.
    floor = math.log(2) if kind == "softmax" else 0.0
    assert floor < np.mean(losses[-40:]) < 0.75 * np.mean(losses[:10])


def test_losses_are_infinite_from_where_they_are_no_longer_finite():
    model = MODELS["softmax"](len(COUNTS), 4)
    normal_(model, 3.0, torch.Generator().manual_seed(0))
    losses = train_(model, batches("softmax"), rate=1e30)
    assert math.isfinite(losses[0])
    assert losses[-1] == math.inf
    assert not any(map(math.isnan, losses))
    assert len(losses) == 60
