"""Documents of comparisons and sweeps: what they say of runs whose results were worked out by hand."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest

from hessinit.present import describe, draw, to_text
from hessinit.present.comparison import collect_notes, loss_charts, rank_schemes
from hessinit.present.document import HeatMap, LineChart, Series, Table
from hessinit.results.comparison import Comparison
from result_examples import example_comparison, make_comparison, make_run, make_sweep, two_schemes

INF, NAN = math.inf, math.nan


def chart(comparison: Comparison, name: str) -> LineChart:
    found = describe(comparison).chart(name)
    assert isinstance(found, LineChart)
    return found


def line(found: LineChart, name: str) -> Series:
    (one,) = [series for series in found.series if series.name == name and series.symbol != "cross"]
    return one


def one_rate(**losses) -> dict:
    return {(scheme, 0.1): some for scheme, some in losses.items()}


def rates(**losses) -> dict:
    """One seed for each scheme and the rates 0.1, 1, …"""
    return {(one, 10.0 ** (at - 1)): (loss,) for one, some in losses.items() for at, loss in enumerate(some)}


def test_the_verdict_agrees_with_the_runs():
    comparison = example_comparison()
    means = {}
    for scheme in comparison.schemes:
        for rate in comparison.learning_rates:
            runs = [r for r in comparison.runs if (r.scheme, r.learning_rate) == (scheme, rate) and r.applies]
            if runs and not any(run.diverged for run in runs):
                means[scheme, rate] = statistics.fmean(run.final_loss for run in runs)
    best, rate = min(means, key=lambda pair: means[pair])
    assert comparison.verdict.startswith(f"{best} has the lowest final loss: {means[best, rate]:.5f}")
    assert f"at lr {rate:g}; next" in comparison.verdict
    by_scheme = {scheme: min(means[pair] for pair in means if pair[0] == scheme) for scheme, _ in means}
    assert rank_schemes(comparison) == [*sorted(by_scheme, key=lambda s: by_scheme[s]), "fixup"]


def test_the_heat_map_has_the_loss_of_each_scheme_at_each_rate_and_none_of_what_diverged():
    found = describe(two_schemes()).chart("heat map")
    assert isinstance(found, HeatMap)
    assert (list(found.rows), found.columns) == (["lsuv", "he"], ["0.1", "1"])
    assert found.values[0] == pytest.approx([1.5, 0.55])
    assert found.values[1] == pytest.approx([1.1, NAN], nan_ok=True)
    assert found.texts == [["1.50", "0.550"], ["1.10", "✗ 1/2"]]
    assert found.marked == [[False, True], [True, False]]
    assert found.details[0][1] == "± 0.05 over 2 seeds; lr·‖H‖ = 4 at initialization"
    assert found.details[1][1] == "1 of 2 seeds diverged; lr·‖H‖ = 4 at initialization"
    assert found.description.endswith("at lr 0.1: he; lr 1: lsuv.")


def test_a_curve_is_the_median_over_seeds_with_their_range_and_a_cross_for_those_that_diverge():
    losses = [(2.0, 1.0), (2.0, 1.2), (2.0, 1.9)]
    runs = [make_run("a", 0.1, seed, each[1], losses=each) for seed, each in enumerate(losses)]
    runs.append(make_run("a", 0.1, 3, INF, losses=(2.0, 50.0)))
    found = chart(make_comparison({("a", 0.1): (1.0,) * 4}, runs=tuple(runs)), "losses")
    curve = line(found, "a")
    assert (curve.x, curve.y, curve.low, curve.high) == ([0.5, 1.5], [2.0, 1.2], [2.0, 1.0], [2.0, 1.9])
    (cross,) = [series for series in found.series if series.symbol == "cross"]
    assert (cross.x, cross.y, cross.details) == ([1.5], [INF], ["1 of 4 seeds diverged"])
    losses = (2.0, 4.0, 20.0, 90.0, INF)
    runs = (make_run("a", 1.0, 0, INF, losses=losses), make_run("b", 1.0, 0, 4.5))
    found = chart(make_comparison({("a", 1.0): (1.0,), ("b", 1.0): (4.5,)}, runs=runs), "losses")
    assert 4.5 < found.y_range[1] < 20  # an exploding line does not flatten the others
    best = chart(make_comparison(rates(he=(1.0, 1.5), lsuv=(1.4, 0.5))), "losses")
    assert [series.name for series in best.series] == ["lsuv, lr 1", "he, lr 0.1"]


def test_a_sweep_shows_losses_with_errors_over_the_curvature():
    sweep = make_sweep({1.0: (INF, 0.5), 0.1: (1.0, 1.2)}, {1.0: 80.0, 0.1: 8.0})
    found = chart(sweep, "final losses")
    trained = line(found, "std 0.1")
    assert (*trained.x, *trained.y, *trained.low, *trained.high) == pytest.approx((0.8, 1.1, 1.0, 1.2))
    (cross,) = [series for series in found.series if series.symbol == "cross"]
    assert (cross.x, cross.y) == (pytest.approx([8.0]), [INF])
    assert cross.details[0].startswith("1 of 2 seeds diverged")
    assert [(rule.value, rule.upright) for rule in found.rules] == [(2.0, True)]
    assert not chart(replace(sweep, optimizer="adam"), "final losses").rules


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (one_rate(a=(1.0, 1.2), b=(1.1, 1.3), c=(1.9, 1.91)),
         "a has the lowest final loss: 1.10 ± 0.10 at lr 0.1; next b, 1.20 ± 0.10 at lr 0.1, within two"),
        (one_rate(a=(1.0,), b=(1.01,)), "a has the lowest final loss (one seed: no error bars): 1.00 at"),
        (one_rate(a=(1.0,), b=(1.01,), c=(INF,)), "1.01 at lr 0.1. c does not train with every seed at lr"),
        (one_rate(a=(1.0, 1.1), b=(None, None)), "a has the lowest final loss: 1.05 ± 0.05 at lr 0.1."),
        # a: ((1 − 0.5) + 0)/2; b diverges
        (rates(a=(1.0, 0.1), b=(0.5, INF)),
         "a trains wherever another scheme does (2 rates): its loss is 0.25 above the lowest at each rate"),
        # A constant in the loss changes nothing.
        (rates(a=(-999.0, -999.9), b=(-999.5, INF)), "(2 rates): its loss is 0.25 above the lowest at each"),
        (rates(a=(1.0, 0.1, INF), b=(1.5, 0.2, INF)), "does (2 rates): its loss is 0 above the lowest"),
        ({0.2: (1.0, 1.2), 0.1: (1.1, 1.3)}, "std 0.2 has the lowest final loss: 1.10 ± 0.10 at lr 0.1;"),
        ({0.2: (INF, 1.0, 1.0), 0.1: (1.0, 1.1, 1.2)}, "std 0.2 does not train with every seed at lr 0.1."),
    ],
)  # fmt: skip
def test_the_verdict_names_winners_ties_and_divergences(losses, said):
    is_sweep = isinstance(next(iter(losses)), float)
    comparison = make_sweep(losses, {0.2: 2.0, 0.1: 1.0}) if is_sweep else make_comparison(losses)
    assert said in comparison.verdict
    assert describe(comparison).answer == ""  # the verdict is the answer


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (one_rate(a=(INF, NAN), b=(None, None)),
         "No scheme trains with every seed at lr 0.1; try a lower rate."),
        (one_rate(a=(None, None)), "No scheme applies to this model; the notes say why."),
    ],
)  # fmt: skip
def test_where_no_scheme_trains_the_first_line_says_so_and_nothing_else_is_concluded(losses, said):
    comparison = make_comparison(losses)
    assert comparison.verdict == said
    assert to_text(comparison, 100).splitlines()[0] == said
    with pytest.raises(ValueError, match="no scheme learns"):
        _ = comparison.best


def test_a_scheme_that_does_not_learn_with_every_seed_has_not_won():
    idle = make_run("a", 0.1, 1, 1.94, outcome="did not learn")
    learned = [make_run("b", 0.1, seed, 1.5, outcome="learned") for seed in (0, 1)]
    runs = (make_run("a", 0.1, 0, 0.9, outcome="learned"), idle, *learned)
    comparison = make_comparison(one_rate(a=(0.9, 1.94), b=(1.5, 1.5)), runs=runs, constant_loss=1.9)
    assert comparison.loss("a", 0.1) < comparison.loss("b", 0.1)
    assert comparison.best == ("b", 0.1)
    assert comparison.verdict == (
        "b has the lowest final loss: 1.50 ± 0 at lr 0.1. a does not learn in 20 steps at lr 0.1: the loss "
        "ends no lower than that of a constant output (1.9)."
    )
    nobody = make_comparison(one_rate(a=(1.94,)), runs=(idle,), constant_loss=1.9)
    assert nobody.verdict == (
        "No scheme learns at lr 0.1: every loss ends no lower than that of a constant output (1.9). Try more "
        "steps or other learning rates."
    )
    assert to_text(nobody, 200).splitlines()[0] == nobody.verdict
    with pytest.raises(ValueError, match="no scheme learns"):
        _ = nobody.best


def test_the_table_sorts_by_numbers_and_has_errors_where_rates_are_few():
    (table,) = [block for block in describe(two_schemes()).blocks if isinstance(block, Table)]
    columns = {column.heading: column for column in table.columns}
    assert columns["lr 1"].keys == pytest.approx([0.55, NAN], nan_ok=True)
    assert columns["lr 1"].marks == ["best", "diverged"]
    assert (columns["best lr"].keys, columns["‖H‖"].keys) == ([1.0, 0.1], [4.0, 4.0])
    assert "±" in columns["lr 1"].cells[0]
    (many,) = [block for block in describe(example_comparison()).blocks if isinstance(block, Table)]
    assert "±" not in "".join(many.columns[1].cells)
    runs = tuple(make_run("a", rate, 0, 1.0, norms={"network": 2 / rate}) for rate in (0.1, 1.0))
    assert " 2 … 20 " in to_text(make_comparison(rates(a=(1.0, 1.0)), rate_dependent=("a",), runs=runs), 100)


def test_a_scheme_has_one_note_and_an_unnamed_optimizer_is_yours():
    runs = tuple(make_run("a", 0.1, seed, 1.0, note=f"stopped at {seed + 0.5}") for seed in range(3))
    comparison = make_comparison(one_rate(a=(1.0,) * 3), runs=runs, notes=("read from a folder",))
    once = ["read from a folder.", "a in 3 of 3 runs, for example: stopped at 0.5."]
    assert collect_notes(comparison) == once
    for name, shown in (("__main__.<lambda>", "your optimizer"), ("__main__.lion", "lion")):
        assert f"s: {shown}, batches of 8" in to_text(replace(comparison, optimizer=name), 100)
    broken = make_comparison(one_rate(a=(NAN,)), runs=(make_run("a", 0.1, 0, NAN, first_loss=NAN),))
    assert broken.verdict.startswith("No scheme trains: the initial loss is not finite. Check the data")


@pytest.mark.parametrize(
    "losses",
    [one_rate(a=(INF,)), one_rate(a=(None,)), one_rate(a=(0.0,), b=(1.0,)),
     one_rate(a=(-3.0,), b=(1e-300,)), {("", 0.1): (1.0,), ("[red]\x1b[2J", 0.1): (NAN,)}],
)  # fmt: skip
def test_extremes_are_shown_all_the_same(losses):
    bare = make_comparison(losses, runs=tuple(replace(r, norms=None) for r in make_comparison(losses).runs))
    for comparison in (make_comparison(losses), bare):
        assert "\x1b" not in to_text(comparison, 80)
        for each in describe(comparison).charts:
            draw(comparison, each.name)[0].figure.canvas.draw()
            plt.close("all")
    assert "‖H‖" not in to_text(bare, 80)


def test_the_axis_holds_hessinit_s_own_curve_however_high_it_begins():
    high = Series("hessinit, lr 0.1", [500.0, 2.0], [1, 2], high=[600.0, 3.0], low=[400.0, 1.0])
    other = Series("he, lr 0.1", [900.0, 1.0], [1, 2])
    (chart,) = loss_charts("losses", "c", "d", [high, other], first_losses=[2.3])
    assert chart.y_range[0] < 1 < 600 < chart.y_range[1] < 900
    (chart,) = loss_charts("losses", "c", "d", [other, replace(other, y=[2.0, 1.0])], [2.3])
    assert chart.y_range[1] < 6.9
