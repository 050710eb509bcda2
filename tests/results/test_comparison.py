"""What follows from the runs of a comparison, on tables worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hessinit.results.comparison import Comparison, Run

# scheme → rate → final losses of the seeds 0, 1 and 2
FINAL: dict[str, dict[float, tuple[float, float, float]]] = {
    "he": {0.01: (1.0, 2.0, 3.0), 0.1: (0.5, 0.75, 1.0)},
    "lsuv": {0.01: (0.25, 0.25, 0.25), 0.1: (0.1, math.inf, 0.1)},
    "odd": {0.01: (math.nan,) * 3, 0.1: (math.nan,) * 3},
}
NORMS = {"he": (1.0, 2.0, 6.0), "lsuv": (4.0, math.inf, 5.0)}


def _run(scheme: str, rate: float, seed: int, final: float, **changes: Any) -> Run:
    applies = scheme != "odd"
    norms = {"fc": 0.5, "network": NORMS[scheme][seed]} if applies and rate == 0.01 else None
    settings = {
        "scheme": scheme, "learning_rate": rate, "seed": seed, "losses": (2.5, final), "first_loss": 2.5,
        "final_loss": final, "steps_done": 20 if applies else 0, "norms": norms, "seconds": 1.5,
        "diverged": applies and not final < 2.625, "note": "" if applies else "no weights to set",
    }  # fmt: skip
    return Run(**{**settings, **changes})


def _comparison(**changes: Any) -> Comparison:
    runs = tuple(
        _run(scheme, rate, seed, final)
        for scheme, rates in FINAL.items()
        for rate, finals in rates.items()
        for seed, final in enumerate(finals)
    )
    settings = {
        "kind": "compare", "schemes": tuple(FINAL), "learning_rates": (0.01, 0.1), "seeds": (0, 1, 2),
        "runs": runs, "steps": 20, "batch_size": 8, "optimizer": "sgd", "examples": 100, "seconds": 3.0,
    }  # fmt: skip
    return Comparison(**{**settings, **changes})


def test_losses_errors_and_divergences_by_hand() -> None:
    table = _comparison()
    assert table.loss("he", 0.01) == 2.0
    assert table.error("he", 0.01) == pytest.approx(1 / math.sqrt(3))
    assert table.error("lsuv", 0.01) == 0.0
    assert table.diverged("he", 0.01) == 1  # 3 is more than 5 % above 2.5
    assert (table.loss("lsuv", 0.1), table.diverged("lsuv", 0.1)) == (math.inf, 1)
    assert math.isnan(table.error("lsuv", 0.1))
    assert math.isnan(table.loss("odd", 0.1))
    assert table.diverged("odd", 0.1) == 0
    assert [table.applies(scheme) for scheme in table.schemes] == [True, True, False]


def test_the_best_rate_is_one_at_which_no_seed_diverges() -> None:
    table = _comparison()
    assert (table.best_rate("he"), table.best_rate("lsuv")) == (0.1, 0.01)
    assert math.isnan(table.best_rate("odd"))
    assert table.best == ("lsuv", 0.01)
    rising = _comparison(schemes=("he",), learning_rates=(0.01,))
    assert math.isnan(rising.best_rate("he"))  # the loss is finite, and above the first with one seed
    hopeless = _comparison(schemes=("odd",))
    with pytest.raises(ValueError, match="no scheme trains with every seed at any rate"):
        hopeless.best


def test_initial_norms_serve_every_rate_unless_they_depend_on_it() -> None:
    table = _comparison()
    assert table.layers == ("fc",)
    assert table.norm("he") == table.norm("he", 0.1) == table.norm("he", 0.01) == 3.0
    assert table.norm("he", layer="fc") == 0.5
    assert table.norm("lsuv") == math.inf
    assert math.isnan(table.norm("odd"))
    assert math.isnan(table.norm("he", layer="nowhere"))
    dependent = _comparison(rate_dependent=("he",))
    assert dependent.norm("he", 0.01) == 3.0
    assert math.isnan(dependent.norm("he", 0.1))  # another rate's norm is not its own


def test_one_seed_has_no_error() -> None:
    alone = _comparison(seeds=(0,), runs=tuple(run for run in _comparison().runs if run.seed == 0))
    assert alone.loss("he", 0.01) == 1.0
    assert math.isnan(alone.error("he", 0.01))


def test_schemes_and_rates_that_were_not_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="scheme='glorot' was not compared; choose from 'he', 'lsuv', 'odd'"):
        _comparison().loss("glorot", 0.1)
    with pytest.raises(ValueError, match="learning_rate=0.2 was not tried; choose from 0.01, 0.1"):
        _comparison().loss("he", 0.2)
