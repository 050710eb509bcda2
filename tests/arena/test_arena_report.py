from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from arena import figures, report
from arena.example import made_up_outcomes
from arena.scores import mean_ranks, regret


@pytest.fixture
def shown() -> str:
    console = Console(file=io.StringIO(), width=140, highlight=False)
    report.show(*made_up_outcomes(), console=console)
    return console.file.getvalue()


def test_the_tables_hold_the_scores(shown: str) -> None:
    outcomes, ours, _ = made_up_outcomes()
    found = regret(outcomes, "hessinit", ours)
    row = next(line for line in shown.splitlines() if line.startswith("» hessinit"))
    assert f"{mean_ranks(outcomes)['hessinit'].rank:.2f} ±" in row
    assert report.percent(found.mean) in row
    assert report.percent(found.worst) in row
    assert "hessinit fails where another trains: post-ln at 0.3, 1 seeds" in shown
    assert "Within 5 % of the best of the grid on" in shown


def test_the_heat_map_shows_the_regret_of_every_cell() -> None:
    from matplotlib import pyplot

    outcomes, ours, _ = made_up_outcomes()
    ax = figures.draw_regret(outcomes, "hessinit", ours)
    values = np.ma.filled(ax.images[0].get_array(), np.nan)
    for (task, rate), value in regret(outcomes, "hessinit", ours).cells.items():
        row = [outcome.task for outcome in outcomes].index(task)
        assert values[row, outcomes[row].rates.index(rate)] == value
    assert any(text.get_text().startswith("✕") for text in ax.texts)
    assert any(text.get_text() == "nothing trains" for text in ax.texts)
    pyplot.close("all")


def test_the_bars_are_the_mean_ranks_best_first() -> None:
    from matplotlib import pyplot

    outcomes, ours, _ = made_up_outcomes()
    ax = figures.draw_ranks(outcomes, ours)
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == [each.rank for each in mean_ranks(outcomes).values()]
    pyplot.close("all")
