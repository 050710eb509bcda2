from __future__ import annotations

import math

import pytest
from shown_examples import make_comparison, make_run, make_two_starts

from hessinit.present.comparison_standing import (
    at_best_rate,
    best_start,
    diverges_at,
    guessing,
    ordered_starts,
    regrets,
)


def test_the_best_rate_is_one_at_which_every_seed_trains():
    comparison = make_two_starts()
    assert comparison.best_rate("he") == 0.1
    assert comparison.best_rate("lsuv") == 1.0
    assert [best_start(comparison, rate) for rate in (0.1, 1.0)] == ["he", "lsuv"]
    assert at_best_rate(comparison, "he").mean == pytest.approx(1.1)
    assert at_best_rate(comparison, "he").error == pytest.approx(0.1)


def test_a_finite_loss_that_rose_is_no_best_one():
    comparison = make_comparison({("he", 0.1): (9.0, 9.0), ("lsuv", 0.1): (1.0, 1.0)})
    assert math.isnan(comparison.best_rate("he"))
    assert comparison.best == ("lsuv", 0.1)
    only = make_comparison({("he", 0.1): (9.0, 9.0)})
    assert best_start(only, 0.1) is None


def test_starts_that_never_train_and_that_do_not_apply_come_last():
    losses = {("no", 0.1): (None,), ("never", 0.1): (math.nan,), ("b", 0.1): (1.0,), ("a", 0.1): (0.5,)}
    assert ordered_starts(make_comparison(losses)) == ("a", "b", "never", "no")


def test_regret_is_the_mean_logarithm_over_the_rates_worked_out_by_hand():
    comparison = make_comparison(
        {("a", 0.1): (1.0,), ("a", 1.0): (0.1,), ("b", 0.1): (1.5,), ("b", 1.0): (math.inf,)}
    )
    found = regrets(comparison)
    assert found["a"].mean == pytest.approx(0.0)
    # At the rate 1 it counts as guessing: the first loss, 2, against 0.1.
    assert found["b"].mean == pytest.approx((math.log(1.5) + math.log(20)) / 2)
    assert math.isnan(found["b"].error)


def test_a_divergence_counts_no_less_than_a_start_that_trains_there():
    # Guessing is 2; at the rate 1 the other start ends above it.
    runs = (
        make_run("low", 0.1, 0, 0.5), make_run("low", 1.0, 0, math.inf),
        make_run("high", 0.1, 0, 6.0, first_loss=500.0, diverged=False),
        make_run("high", 1.0, 0, 4.0, first_loss=500.0, diverged=False),
    )  # fmt: skip
    losses = {(run.scheme, run.learning_rate): (run.final_loss,) for run in runs}
    comparison = make_comparison(losses, runs=runs)
    found = regrets(comparison)
    assert found["low"].mean == pytest.approx(0.0)
    assert found["high"].mean == pytest.approx(math.log(6 / 0.5) / 2)
    assert diverges_at(comparison, "low") == (1.0,)
    assert diverges_at(comparison, "high") == ()


def test_a_finite_divergence_counts_as_guessing():
    runs = (make_run("a", 0.1, 0, 0.5), make_run("b", 0.1, 0, 1.0, diverged=True))
    comparison = make_comparison({("a", 0.1): (0.5,), ("b", 0.1): (1.0,)}, runs=runs)
    assert regrets(comparison)["b"].mean == pytest.approx(math.log(2 / 0.5))


def test_rates_at_which_nothing_trains_are_left_out_of_the_regret():
    comparison = make_comparison(
        {("a", 0.1): (1.0,), ("a", 9.0): (math.inf,), ("b", 0.1): (2.0,), ("b", 9.0): (math.nan,)}
    )
    assert regrets(comparison)["b"].mean == pytest.approx(math.log(2))


def test_losses_that_are_not_positive_have_no_regret():
    assert regrets(make_comparison({("a", 0.1): (-1.0,), ("b", 0.1): (0.5,)})) == {}


def test_guessing_is_the_lowest_first_loss_of_a_start():
    runs = tuple(make_run("a", 0.1, 0, 1.0, first_loss=first) for first in (3.0, 5.0))
    runs += (make_run("b", 0.1, 0, 1.0, first_loss=9.0), make_run("c", 0.1, 0, None))
    comparison = make_comparison({("a", 0.1): (1.0,), ("b", 0.1): (1.0,), ("c", 0.1): (None,)}, runs=runs)
    assert guessing(comparison) == 4.0
