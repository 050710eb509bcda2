"""What a comparison says of its runs, on tables worked out by hand; and its way to a file and back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hessinit.results.comparison import Comparison, Run

# start → rate → final losses of the seeds 0, 1 and 2
FINAL: dict[str, dict[float, tuple[float, float, float]]] = {
    "he": {0.01: (1.0, 2.0, 3.0), 0.1: (0.5, 0.75, 1.0)},
    "lsuv": {0.01: (0.25, 0.25, 0.25), 0.1: (0.1, math.inf, 0.1)},
    "odd": {0.01: (math.nan,) * 3, 0.1: (math.nan,) * 3},
}
NORMS = {"he": (1.0, 2.0, 6.0), "lsuv": (4.0, math.inf, 5.0)}


def _run(start: str, rate: float, seed: int, final: float, **changes: Any) -> Run:
    applies = start != "odd"
    norms = {"fc": 0.5, "network": NORMS[start][seed]} if applies and rate == 0.01 else None
    settings = {
        "scheme": start, "learning_rate": rate, "seed": seed, "losses": (2.5, final), "first_loss": 2.5,
        "final_loss": final, "steps_done": 20 if applies else 0, "norms": norms, "seconds": 1.5,
        "diverged": applies and not final < 2.625, "note": "" if applies else "no weights to set",
    }  # fmt: skip
    return Run(**{**settings, **changes})


def _comparison(**changes: Any) -> Comparison:
    runs = tuple(
        _run(start, rate, seed, final)
        for start, rates in FINAL.items()
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
    assert [table.applies(start) for start in table.schemes] == [True, True, False]


def test_the_best_rate_is_one_at_which_no_seed_diverges() -> None:
    table = _comparison()
    assert (table.best_rate("he"), table.best_rate("lsuv")) == (0.1, 0.01)
    assert math.isnan(table.best_rate("odd"))
    assert table.best == ("lsuv", 0.01)
    rising = _comparison(schemes=("he",), learning_rates=(0.01,))
    assert math.isnan(rising.best_rate("he"))  # the loss is finite, and above the first with one seed
    hopeless = _comparison(schemes=("odd",))
    with pytest.raises(ValueError, match="no start trains with every seed at any rate"):
        hopeless.best


def test_norms_at_the_start_serve_every_rate_unless_they_depend_on_it() -> None:
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


def test_starts_and_rates_that_were_not_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="start='glorot' was not compared; choose from 'he', 'lsuv', 'odd'"):
        _comparison().loss("glorot", 0.1)
    with pytest.raises(ValueError, match="learning_rate=0.2 was not tried; choose from 0.01, 0.1"):
        _comparison().loss("he", 0.2)


def test_a_comparison_comes_back_from_its_file(tmp_path: Path) -> None:
    table = _comparison(stds=(0.1, 1.0), warmup=4, notes=("one",), settings={"loss": None}, seconds=None)
    table.save(tmp_path / "comparison.json")
    again = Comparison.load(tmp_path / "comparison.json")
    assert again == table
    assert again.runs == table.runs
    assert hash(again) == hash(table)
    json.loads((tmp_path / "comparison.json").read_text(), parse_constant=pytest.fail)  # strict JSON


def test_equal_means_the_same_numbers_whatever_the_time() -> None:
    table = _comparison()
    slower = tuple(
        _run(run.scheme, run.learning_rate, run.seed, run.final_loss, seconds=9) for run in table.runs
    )
    assert _comparison(runs=slower, seconds=99.0) == table
    other = (_run("he", 0.01, 0, 1.0, first_loss=2.4), *table.runs[1:])
    assert _comparison(runs=other) != table
    assert _comparison(steps=21) != table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "hessinit curvature report"}, "not a hessinit comparison: it holds 'hessinit curvature"),
        ({"schema": 99}, "has comparison schema 99, and this hessinit reads up to 1"),
        ({"runs": [{}]}, "is not a whole comparison: 'norms' is missing"),
        ({"experiment": "race"}, "is not a whole comparison: .*race"),
        ({"steps": None}, "is not a whole comparison"),
    ],
)
def test_files_of_something_else_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Comparison.from_dict({**_comparison().to_dict(), **change})


def test_text_that_is_no_comparison_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the text is not JSON \(.*Give a file that comparison.save\(\) wrote"
    ):
        Comparison.from_json("{")
    with pytest.raises(ValueError, match="the data is not a hessinit comparison: it holds a list"):
        Comparison.from_dict([])
