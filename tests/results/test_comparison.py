"""What follows from the runs of a comparison, on tables worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hessinit.results.comparison import Comparison
from result_examples import make_comparison, make_run

# scheme → rate → final losses of the seeds 0, 1 and 2; every run begins at 2
FINAL = {
    ("he", 0.01): (1.0, 2.0, 3.0), ("he", 0.1): (0.5, 0.75, 1.0), ("lsuv", 0.01): (0.25, 0.25, 0.25),
    ("lsuv", 0.1): (0.1, math.inf, 0.1), ("odd", 0.01): (None,) * 3, ("odd", 0.1): (None,) * 3,
}  # fmt: skip
NORMS = {"he": (1.0, 2.0, 6.0), "lsuv": (4.0, math.inf, 5.0)}


def compared(**changes: Any) -> Comparison:
    runs = []
    for (scheme, rate), finals in FINAL.items():
        for seed, final in enumerate(finals):
            measured = scheme in NORMS and rate == 0.01
            norms = {"fc": 0.5, "network": NORMS[scheme][seed]} if measured else None
            runs.append(make_run(scheme, rate, seed, final, norms=norms))
    return make_comparison(FINAL, **{"runs": tuple(runs), **changes})


def test_losses_errors_divergences_and_best_rates_by_hand() -> None:
    table = compared()
    assert table.loss("he", 0.01) == 2.0
    assert table.error("he", 0.01) == pytest.approx(1 / math.sqrt(3))
    assert table.error("lsuv", 0.01) == 0.0
    assert table.diverged("he", 0.01) == 1  # 3 is more than 5 % above 2
    assert (table.loss("lsuv", 0.1), table.diverged("lsuv", 0.1)) == (math.inf, 1)
    unknown = table.error("lsuv", 0.1), table.loss("odd", 0.1), table.best_rate("odd")
    assert all(map(math.isnan, unknown))
    assert table.diverged("odd", 0.1) == 0
    assert [table.applies(scheme) for scheme in table.schemes] == [True, True, False]
    assert (table.best_rate("he"), table.best_rate("lsuv"), table.best) == (0.1, 0.01, ("lsuv", 0.01))
    rising = compared(schemes=("he",), learning_rates=(0.01,))
    assert math.isnan(rising.best_rate("he"))  # the loss is finite, and above the first with one seed
    with pytest.raises(ValueError, match="no scheme learns with every seed at any rate"):
        compared(schemes=("odd",)).best
    alone = compared(seeds=(0,), runs=tuple(run for run in table.runs if run.seed == 0))
    assert alone.loss("he", 0.01) == 1.0
    assert math.isnan(alone.error("he", 0.01))


def test_initial_norms_serve_every_rate_unless_they_depend_on_it() -> None:
    table = compared()
    assert table.layers == ("fc",)
    assert table.norm("he") == table.norm("he", 0.1) == table.norm("he", 0.01) == 3.0
    assert (table.norm("he", layer="fc"), table.norm("lsuv")) == (0.5, math.inf)
    dependent = compared(rate_dependent=("he",))
    assert dependent.norm("he", 0.01) == 3.0
    unknown = table.norm("odd"), table.norm("he", layer="nowhere"), dependent.norm("he", 0.1)
    assert all(map(math.isnan, unknown))  # another rate's norm is not its own


def test_schemes_and_rates_that_were_not_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="scheme='glorot' is unknown; choose from 'he', 'lsuv', 'odd'"):
        compared().loss("glorot", 0.1)
    with pytest.raises(ValueError, match="learning_rate=0.2 was not tried; choose from 0.01, 0.1"):
        compared().loss("he", 0.2)


def test_a_scheme_that_does_not_learn_with_every_seed_is_not_the_best() -> None:
    outcomes = {("lsuv", 0.01, 1): "did not learn", ("he", 0.1, 0): "learned"}
    keys = [(run, (run.scheme, run.learning_rate, run.seed)) for run in compared().runs]
    runs = tuple(replace(run, outcome=outcomes.get(key, "")) for run, key in keys)
    table = compared(runs=runs, constant_loss=0.8)
    assert (table.trains("lsuv", 0.01), table.learns("lsuv", 0.01)) == (True, False)
    assert [table.learns("he", rate) for rate in (0.01, 0.1)] == [False, True]  # one seed of 0.01 diverged
    assert (table.loss("lsuv", 0.01), table.loss("he", 0.1)) == (0.25, 0.75)
    assert table.best == ("he", 0.1)
    alone = compared(schemes=("lsuv",), runs=runs)
    assert not alone.learns("lsuv", 0.01)
    with pytest.raises(ValueError, match="no scheme learns with every seed at any rate"):
        alone.best
    assert Comparison.from_json(table.to_json()) == table
    assert [run.outcome for run in Comparison.from_json(table.to_json()).runs_of("lsuv", 0.01)] == [
        "", "did not learn", "",
    ]  # fmt: skip


@pytest.mark.parametrize("constant", [0.0, 1000.0, -1000.0])
def test_nothing_that_is_concluded_depends_on_a_constant_in_the_loss(constant: float) -> None:
    runs = tuple(
        replace(run, first_loss=run.first_loss + constant, final_loss=run.final_loss + constant)
        for run in compared().runs
    )
    table = compared(runs=runs, constant_loss=1.9 + constant)
    assert table.best == ("lsuv", 0.01)
    for scheme in ("he", "lsuv"):
        assert table.best_rate(scheme) == compared().best_rate(scheme)
        for rate in (0.01, 0.1):
            assert table.learns(scheme, rate) == compared().learns(scheme, rate)
