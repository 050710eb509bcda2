from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console
from shown_examples import make_comparison, make_run, make_sweep, make_two_starts

from hessinit.present.comparison_example import example_comparison, example_sweep
from hessinit.present.comparison_sentences import collect_notes
from hessinit.present.comparison_table import render_comparison
from hessinit.present.comparison_verdict import conclude_comparison


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
        "next b, 4.47 times (a divergence counts as guessing)." in conclude_comparison(comparison)
    )


def test_a_start_that_diverges_where_another_trains_is_not_called_forgiving():
    comparison = make_comparison(
        {("bold", 0.1): (0.1,), ("bold", 1.0): (math.inf,), ("calm", 0.1): (1.0,), ("calm", 1.0): (1.9,)}
    )
    # bold: √(1 · 2/1.9) = 1.03; calm: √(1/0.1 · 1) = 3.16
    assert (
        "Over the 2 rates bold loses least, on average 1.03 times the loss of the best start at each, but it "
        "diverges at lr 1, which counts as guessing; calm diverges nowhere that another start trains, at "
        "3.16 times." in conclude_comparison(comparison)
    )


def test_a_tie_passes_over_no_start_that_is_nearer():
    comparison = make_comparison(
        {("a", 0.1): (1.0, 1.02), ("b", 0.1): (1.2, 1.22), ("c", 0.1): (0.9, 1.7), ("d", 0.1): (1.8, 1.81)}
    )
    verdict = conclude_comparison(comparison)
    assert verdict.startswith(
        "a wins at its best rate: 1.01 ± 0.01 at lr 0.1; next b, 1.21 ± 0.01 at lr 0.1."
    )
    assert verdict.endswith("c, farther off but less certain, is within two standard errors, too.")


def test_the_same_loss_with_one_seed_is_a_tie():
    comparison = make_comparison({(start, rate): (1.0,) for start in "ab" for rate in (0.1, 0.2)})
    assert conclude_comparison(comparison) == (
        "a and b tie at their best rates: 1.00 at lr 0.1 and 1.00 at lr 0.1, the same loss (one seed: no "
        "error bars). a is the most forgiving over the 2 rates: on average 1.00 times the loss of the best "
        "start at each; next b, 1.00 times, the same."
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


@pytest.mark.parametrize(
    ("losses", "changes", "verdict"),
    [
        ((None, None), {}, "No start applies to this model; the notes say why."),
        (
            (math.nan, math.nan),
            {"first_loss": math.nan},
            "the very first loss is not finite, whatever the rate",
        ),
        ((math.inf, 1.0), {}, "No start trains with every seed at any of these rates; try lower ones."),
    ],
)
def test_what_is_said_where_nothing_trains_fits_the_reason(losses, changes, verdict):
    runs = tuple(make_run("a", 0.1, seed, loss, **changes) for seed, loss in enumerate(losses))
    assert verdict in conclude_comparison(make_comparison({("a", 0.1): losses}, runs=runs))


def test_one_seed_of_three_that_diverges_is_not_all_of_them():
    losses = {("a", 0.1): (1.0, 1.1, 1.2), ("b", 0.1): (1.0, 1.1, math.inf)}
    verdict = conclude_comparison(make_comparison(losses))
    assert verdict.endswith("b trains at none of these rates with every seed.")
    swept = make_sweep({1.0: (math.inf, 1.0, 1.0), 0.1: (1.0, 1.1, 1.2)}, {1.0: 80.0, 0.1: 8.0})
    assert conclude_comparison(swept).endswith("std 1 diverges with 1 of 3 seeds.")


def test_what_is_not_shown_is_not_explained():
    narrow = render_comparison(make_comparison({("a", 0.1): (1.0, 1.2), ("b", 0.1): (2.0, 2.0)}), width=24)
    assert "‖H‖:" not in narrow
    assert "✗" not in narrow
    assert "standard error over" not in flat(narrow)


@pytest.mark.parametrize(
    ("optimizer", "shown"),
    [
        ("__main__.<lambda>", "your optimizer"),
        ("net.f.<locals>.g", "your optimizer"),
        ("__main__.lion", "lion"),
    ],
)
def test_an_optimizer_without_a_name_is_the_reader_s(optimizer, shown):
    text = render_comparison(make_comparison({("a", 0.1): (1.0,)}, optimizer=optimizer))
    assert f"s: {shown}, batches of 8" in flat(text)


@pytest.mark.parametrize(("steps", "last"), [(20, 10), (500, 50)])
def test_the_losses_that_the_final_one_is_the_mean_of_are_counted(steps, last):
    text = flat(render_comparison(make_comparison({("a", 0.1): (1.0,)}, steps=steps)))
    assert f"Final loss: the mean training loss of the last {last} steps" in text


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
    assert rows[4] == ["0.01", "0.1", "0.2", "0.02", "1.90", "±", "0"]
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
