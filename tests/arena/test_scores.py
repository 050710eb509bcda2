"""Two tasks worked out by hand. Chance is 2, so a run fails from 1.96."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot
from rich.console import Console

from arena import figures, report, scores
from arena.example import made_up_outcomes
from arena.outcomes import Outcome, count_losses, outcome_of
from arena.records import Arena, collect
from arena.tasks import BY_NAME, CPU
from hessinit.results.comparison import Comparison, Run
from result_examples import make_run

NAN, INF = math.nan, math.inf
OURS = ("ours", "ours, other")

# Means over the two seeds, as counted:      rate 0.1   rate 1
#   first   he                                 1.0        2.0 (nan and 9 count as 2)
#           lsuv                               0.5        1.0
#           ours                               0.5        1.5 (1 and inf)
LOSSES = np.array([[[0.8, 1.2], [NAN, 9.0]], [[0.4, 0.6], [1.0, 1.0]], [[0.5, 0.5], [1.0, INF]]])
FIRST = Outcome(task="first", schemes=("he", "lsuv", "ours"), rates=(0.1, 1.0), losses=LOSSES, chance=2.0)
#   second  he 0.4 and 2, ours 0.3 and 2; lsuv does not apply. At rate 1 nothing trains.
LOSSES = np.array([[[0.4, 0.4], [1.99, 2.0]], [[0.2, 0.4], [1.97, NAN]]])
SECOND = Outcome(task="second", schemes=("he", "ours"), rates=(0.1, 1.0), losses=LOSSES, chance=2.0)
BOTH = [FIRST, SECOND]


def test_losses_above_chance_or_not_finite_count_as_chance() -> None:
    assert count_losses([0.5, 2.1, NAN, INF, -INF], 2.0).tolist() == [0.5, 2.0, 2.0, 2.0, 2.0]
    np.testing.assert_allclose(FIRST.means, [[1.0, 2.0], [0.5, 1.0], [0.5, 1.5]])
    assert SECOND.trainable.tolist() == [True, False]


def test_mean_ranks_share_ties_and_leave_out_cells_where_nothing_trains() -> None:
    ranks = scores.mean_ranks(BOTH)
    # first at 0.1: he 3, lsuv and ours share 1.5; at 1: he 3, lsuv 1, ours 2; second at 0.1: he 2, ours 1.
    assert list(ranks) == ["lsuv", "ours", "he"]
    assert ranks["lsuv"] == scores.MeanRank(1.25, 2)
    assert ranks["ours"] == scores.MeanRank(1.5, 3)
    assert ranks["he"] == scores.MeanRank(pytest.approx(8 / 3), 3)


def test_regret_is_held_against_the_best_competitor_at_each_cell() -> None:
    found = scores.regret(BOTH, "ours", OURS)
    cells = {("first", 0.1): 0.0, ("first", 1.0): 0.5, ("second", 0.1): -0.25}
    assert found.cells == pytest.approx(cells)
    assert found.mean == pytest.approx(0.25 / 3)
    assert found.mean_of_losses == pytest.approx(0.5 / 3)
    assert found.worst == pytest.approx(0.5)
    assert found.worst_cell == ("first", 1.0)
    # A competitor is not held against itself nor against ours, and ours not against another variant.
    assert scores.regret(BOTH, "he", OURS).cells == {("first", 0.1): 1.0, ("first", 1.0): 1.0}
    other = outcome(he=[1.0], ours=[1.5], **{"ours, other": [0.01]})
    assert scores.regret([other], "ours", OURS).worst == pytest.approx(0.5)


def test_rate_robustness_is_the_mean_excess_over_the_frozen_best_of_the_grid() -> None:
    references = {each.task: scores.Reference.of(each) for each in BOTH}
    assert references["first"] == scores.Reference(pytest.approx(0.5), (0.1, 1.0))
    assert references["second"] == scores.Reference(pytest.approx(0.3), (0.1,))  # nothing trains at 1
    # ours: first 0.5/0.5 − 1 and 1.5/0.5 − 1, second 0.3/0.3 − 1; tasks weigh alike.
    assert scores.rate_robustness(BOTH, references, {"ours"}) == pytest.approx(((0 + 2) / 2 + 0) / 2)
    # he: first 1/0.5 − 1 and 2/0.5 − 1, second 0.4/0.3 − 1.
    assert scores.rate_robustness(BOTH, references, {"he"}) == pytest.approx(((1 + 3) / 2 + 1 / 3) / 2)
    # The best of he and lsuv at every rate: first 0.5 and 1, second he's 0.4. lsuv alone has one task.
    assert scores.rate_robustness(BOTH, references, {"he", "lsuv"}) == pytest.approx((0.5 + 1 / 3) / 2)
    assert scores.rate_robustness(BOTH, references, {"lsuv"}) == pytest.approx(0.5)
    # A better run of ours is a negative excess: the reference stays.
    assert scores.excesses(SECOND, scores.Reference(0.4, (0.1,)), {"ours"}) == {0.1: pytest.approx(-0.25)}


def test_the_record_of_the_former_default_has_the_published_rate_robustness() -> None:
    arena = Arena.load()
    found = list(arena.frozen.values())
    names = {name for each in found for name in each.schemes}
    assert len(found) == 17
    for chosen, value in (({"hessinit"}, 0.648), (names - {"hessinit"}, 0.642), (names, 0.441)):
        assert scores.rate_robustness(found, arena.references, chosen) == pytest.approx(value, abs=5e-4)


def test_runs_are_collected_beside_the_frozen_record_and_newer_ones_replace_older(tmp_path: Path) -> None:
    task = BY_NAME["relu-3"]
    run = {"task": "relu-3", "start": "hessinit", "loss": 0.5, "accuracy": 0.9}
    runs = [{**run, "lr": rate, "seed": seed} for rate in task.rates for seed in (0, 2)]
    collect(runs, tmp_path)
    collect([{**runs[0], "loss": None}], tmp_path)
    found = Arena.load(tmp_path)
    (outcome,) = found.outcomes(CPU, "hessinit")
    assert outcome.schemes[-1] == "hessinit"
    assert outcome.losses.shape == (11, 5, 2)  # ten others apply, seeds 0 and 2
    assert outcome.means[-1].tolist() == pytest.approx([(0.5 + task.chance) / 2, 0.5, 0.5, 0.5, 0.5])
    assert found.outcomes(CPU, "hessinit + race") == []
    assert found.accuracy(task, "hessinit")[0.3] == pytest.approx(0.9)


def outcome(**losses: object) -> Outcome:
    """One task at one rate, chance 2: the final losses of each scheme by seed."""
    table = np.array([[list(each)] for each in losses.values()])
    return Outcome(task="t", schemes=tuple(losses), rates=(0.1,), losses=table, chance=2.0)


def test_a_run_fails_from_98_percent_of_chance_where_a_rival_trains_in_all_seeds() -> None:
    assert scores.divergences(BOTH, "ours", OURS) == {("first", 1.0): (1,)}
    assert scores.divergences(BOTH, "he", OURS) == {("first", 1.0): (0, 1)}
    assert scores.divergences(BOTH, "lsuv", OURS) == {}
    assert scores.divergences([outcome(he=[0.5, NAN], ours=[NAN, 0.5])], "ours", OURS) == {}
    nearly = outcome(he=[0.5, 0.5, 0.5], ours=[1.95, 1.96, 1.97])
    assert scores.divergences([nearly], "ours", OURS) == {("t", 0.1): (1, 2)}


def test_the_best_rate_of_each_start() -> None:
    half = pytest.approx(0.5), 0.1
    assert scores.best_of_grid(FIRST) == {"he": (pytest.approx(1.0), 0.1), "lsuv": half, "ours": half}
    ranks = scores.best_rate_ranks(BOTH)
    assert ranks["ours"] == scores.MeanRank(1.25, 2)
    assert ranks["he"] == scores.MeanRank(2.5, 2)
    assert ranks["lsuv"] == scores.MeanRank(1.5, 1)


def test_zero_tuning_is_held_against_the_competitors_best_of_the_grid() -> None:
    rows = scores.zero_tuning(BOTH, {"first": [0.5, 0.55], "second": [0.3, INF]}, OURS)
    assert rows[0] == scores.ZeroTuning("first", 0.525, pytest.approx(0.5), "lsuv", 0.1)
    assert rows[0].excess == pytest.approx(0.05)
    assert rows[1].loss == pytest.approx(1.15)  # inf counts as 2
    assert rows[1].best == pytest.approx(0.4)
    assert scores.share_within(rows, 0.051) == 0.5
    assert scores.share_within(rows, 0.049) == 0.0


def test_the_bootstrap_finds_the_standard_error_of_a_mean() -> None:
    losses = np.random.default_rng(0).normal(1.0, 0.2, (1, 1, 40))
    found = Outcome(task="t", schemes=("he",), rates=(0.1,), losses=losses, chance=9.0)

    def mean(drawn: list[Outcome]) -> dict[str, float]:
        return {"he": float(drawn[0].means[0, 0])}

    error = scores.bootstrap_errors([found], mean, draws=2000)["he"]
    assert error == pytest.approx(losses.std(ddof=1) / math.sqrt(40), rel=0.06)
    assert math.isnan(scores.bootstrap_errors([found.with_seeds([0])], mean)["he"])


def comparison(runs: list[Run], schemes: tuple[str, ...]) -> Comparison:
    shared = {"learning_rates": (0.1,), "seeds": (0, 1), "steps": 10, "batch_size": 4, "examples": 8}
    return Comparison(schemes=schemes, runs=tuple(runs), optimizer="sgd", kind="compare", **shared)


def test_a_comparison_becomes_an_outcome_without_the_starts_that_do_not_apply() -> None:
    runs = [make_run("he", 0.1, 1, 0.7), make_run("he", 0.1, 0, 0.6)]
    runs += [make_run(scheme, 0.1, seed, None) for scheme in ("fixup", "ours") for seed in (0, 1)]
    found = outcome_of("t", comparison(runs, ("he", "fixup", "ours")), 2.0, OURS)
    assert found.schemes == ("he", "ours")  # ours may not leave the field
    np.testing.assert_array_equal(found.losses, [[[0.6, 0.7]], [[NAN, NAN]]])


def test_the_tables_and_figures_hold_the_scores() -> None:
    outcomes, ours, _ = made_up_outcomes()
    console = Console(file=io.StringIO(), width=140, highlight=False)
    report.show(*made_up_outcomes(), console=console)
    shown = console.file.getvalue()
    found, ranks = scores.regret(outcomes, "hessinit", ours), scores.mean_ranks(outcomes)
    row = next(line for line in shown.splitlines() if line.startswith("» hessinit"))
    assert f"{ranks['hessinit'].rank:.2f} ±" in row
    assert report.percent(found.mean) in row
    assert report.percent(found.worst) in row
    assert "hessinit fails where another trains: post-ln at 0.3, 1 seeds" in shown
    assert "Within 5 % of the best of the grid on" in shown
    values = np.ma.filled(figures.draw_regret(outcomes, "hessinit", ours).images[0].get_array(), np.nan)
    for (task, rate), value in found.cells.items():
        place = [one.task for one in outcomes].index(task)
        assert values[place, outcomes[place].rates.index(rate)] == value
    widths = [bar.get_width() for bar in figures.draw_ranks(outcomes, ours).patches]
    assert widths == [each.rank for each in ranks.values()]
    pyplot.close("all")
