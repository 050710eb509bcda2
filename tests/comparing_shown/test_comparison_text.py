from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console
from shown_examples import make_comparison, make_run, make_sweep, make_two_starts

from hessinit.present.comparison_example import example_comparison, example_sweep
from hessinit.present.comparison_sentences import collect_notes, conclude_comparison
from hessinit.present.comparison_table import render_comparison


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_table_has_the_best_start_first_and_says_what_it_means():
    text = render_comparison(make_two_starts(), width=100)
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == ["start", "lr", "0.1", "lr", "1", "‖H‖", "best", "lr"]
    assert rows[2] == ["lsuv", "1.50", "±", "0.10", "0.550", "±", "0.050*", "4", "1"]
    assert rows[3] == ["he", "1.10", "±", "0.10*", "diverged", "1/2", "4", "0.1"]
    assert "lsuv wins at its best rate: 0.550 ± 0.050 at lr 1; next he, 1.10 ± 0.10 at lr 0.1." in flat(text)
    assert "2 starts × 2 rates × 2 seeds = 8 runs of 20 steps in 1.5 s: sgd, batches of 8 from 100" in flat(
        text
    )
    assert str(make_two_starts()) == text


def test_the_most_forgiving_start_is_named_with_how_much_it_loses():
    comparison = make_comparison(
        {("a", 0.1): (1.0,), ("a", 1.0): (0.1,), ("b", 0.1): (0.5,), ("b", 1.0): (math.inf,)}
    )
    # a: √(1/0.5 · 1) = 1.41; b: √(1 · 2/0.1) = 4.47
    assert (
        "a is the most forgiving over the 2 rates: on average 1.41 times the loss of the best start at each; "
        "next b, 4.47 times." in conclude_comparison(comparison)
    )


def test_a_tie_is_called_a_tie():
    comparison = make_comparison({("a", 0.1): (1.0, 1.2), ("b", 0.1): (1.1, 1.3), ("c", 0.1): (1.9, 1.91)})
    assert conclude_comparison(comparison) == (
        "a and b tie at their best rates: 1.10 ± 0.10 at lr 0.1 and 1.20 ± 0.10 at lr 0.1, within two "
        "standard errors."
    )


def test_one_seed_has_no_error_bars_and_says_so():
    comparison = make_comparison({("a", 0.1): (1.0,), ("b", 0.1): (1.0001,), ("c", 0.1): (math.inf,)})
    text = render_comparison(comparison, width=100)
    assert "a wins at its best rate (one seed: no error bars): 1.00 at lr 0.1; next b, 1.00" in flat(text)
    assert "c trains at none of these rates." in flat(text)
    assert "±" not in text
    assert [line.split()[:2] for line in text.splitlines()[2:5]] == [
        ["a", "1.00*"],
        ["b", "1.00"],
        ["c", "diverged"],
    ]


def test_nothing_that_trains_is_said_plainly():
    comparison = make_comparison({("a", 0.1): (math.inf, math.nan), ("b", 0.1): (None, None)})
    assert conclude_comparison(comparison) == "No start trains at any of these rates; try lower ones."
    assert "*" not in render_comparison(comparison).split("\n\n")[0]


def test_a_start_that_does_not_apply_says_why_once():
    text = render_comparison(make_comparison({("a", 0.1): (1.0, 1.1), ("fixup", 0.1): (None, None)}))
    assert flat(text).count("fixup does not apply: it needs residual branches.") == 1
    assert "a alone trains: 1.05 ± 0.05 at lr 0.1." in text


def test_the_curvature_of_a_start_that_depends_on_the_rate_is_a_range():
    bare = make_comparison({("ours", 0.1): (1.0,), ("ours", 1.0): (0.5,)}, rate_dependent=("ours",))
    runs = tuple(
        make_run("ours", run.learning_rate, 0, run.final_loss, norms={"network": 2 / run.learning_rate})
        for run in bare.runs
    )
    comparison = make_comparison(
        {("ours", 0.1): (1.0,), ("ours", 1.0): (0.5,)}, rate_dependent=("ours",), runs=runs
    )
    assert " 2 … 20 " in render_comparison(comparison, width=100)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
@pytest.mark.parametrize("made_up", [example_comparison(), example_sweep()])
def test_every_width_is_kept(made_up, width):
    text = render_comparison(made_up, width=width)
    assert max(map(len, text.splitlines())) <= width
    fits_from = 120 if made_up.kind == "compare" else 80
    assert ("Left out of" in text) == (width < fits_from)


def test_a_narrow_terminal_gives_up_errors_before_rates_and_keeps_the_best_rate():
    wide, narrow = (render_comparison(example_comparison(), width=width) for width in (100, 60))
    assert all(f"lr {rate}" in wide.splitlines()[0] for rate in ("0.003", "0.01", "0.03", "0.1", "0.3"))
    assert "Left out of 100 columns: ± standard error." in wide
    assert "lr 0.3" in narrow.splitlines()[0]
    assert "lr 0.003" not in narrow.splitlines()[0]
    assert "✗ 3/3" in narrow
    assert "✗ diverged" in narrow


def test_a_terminal_gets_the_best_in_bold():
    page = io.StringIO()
    Console(file=page, force_terminal=True, width=120, color_system="standard").print(make_two_starts())
    assert "\x1b[1;32m0.550 ± 0.050*" in page.getvalue()
    assert re.search(r"\x1b\[31m *diverged 1/2", page.getvalue())


def test_markup_and_control_characters_in_names_are_shown():
    comparison = make_comparison({("[red]he\x1b[2J", 0.1): (1.0,), ("b", 0.1): (2.0,)})
    text = render_comparison(comparison, width=100)
    assert r"[red]he\x1b[2J wins" in text
    assert "\x1b" not in text


def test_notes_that_differ_in_numbers_only_are_shown_once():
    runs = tuple(make_run("a", 0.1, seed, 1.0, note=f"stopped at {seed + 0.5}") for seed in range(3))
    comparison = make_comparison({("a", 0.1): (1.0, 1.0, 1.0)}, runs=runs, notes=("read from a folder",))
    assert collect_notes(comparison) == [
        "read from a folder.",
        "a in 3 of 3 runs, for example: stopped at 0.5.",
    ]


def test_many_notes_are_cut_and_counted():
    comparison = make_comparison({("a", 0.1): (1.0,)}, notes=tuple(f"note {letter}" for letter in "abcdefgh"))
    assert collect_notes(comparison)[-2:] == ["note e.", "3 more are in the runs."]


def test_a_sweep_has_a_row_for_each_std_with_the_norms_of_its_layers():
    comparison = make_sweep(
        {1.0: (math.inf, math.inf), 0.1: (1.0, 1.2), 0.01: (1.9, 1.9)}, {1.0: 80.0, 0.1: 8.0, 0.01: 0.2}
    )
    text = render_comparison(comparison, width=100)
    rows = [line.split() for line in text.splitlines()]
    assert rows[0][:4] == ["std", "fc1", "network", "lr·‖H‖"]
    assert flat(text.splitlines()[0]).endswith("loss after 20 steps")
    assert rows[2] == ["1", "40", "80", "8", "diverged", "2/2"]
    assert rows[3] == ["0.1", "4", "8", "0.8", "1.10", "±", "0.10*"]
    assert rows[4] == ["0.01", "0.1", "0.2", "0.02", "1.90", "±", "0.00"]
    assert (
        "The loss is lowest at std 0.1: 1.10 ± 0.10, where lr·‖H‖ = 0.8 at the start. std 1 diverges."
        in flat(text)
    )


def test_stds_that_tie_are_named():
    comparison = make_sweep({0.2: (1.0, 1.2), 0.1: (1.1, 1.3)}, {0.2: 2.0, 0.1: 1.0})
    assert conclude_comparison(comparison).endswith("std 0.1 ties with it, within two standard errors.")


def test_runs_without_norms_have_no_column_for_them():
    runs = (make_run("a", 0.1, 0, 1.0, norms=None),)
    text = render_comparison(make_comparison({("a", 0.1): (1.0,)}, runs=runs))
    assert "‖H‖" not in text
