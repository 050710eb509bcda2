from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from report_examples import make_estimate, make_layer, make_report, make_three_layers
from rich.cells import cell_len
from rich.console import Console

from hessinit.present.example import example_report
from hessinit.present.table import render_text
from hessinit.present.words import format_number, join_names
from hessinit.results.estimates import Spread

WIDE = """\
 layer     weight        ‖H‖   verdict
───────────────────────────────────────
 fc1       (256, 784)   0.31   ok
 fc2       (256, 256)   1.84   ok
 fc3       (10, 256)      64   sharp
───────────────────────────────────────
 network   1,234        64.5   sharp

fc3 is 206 times sharper than fc1. Gradient descent is unstable above lr = 2/‖H‖
= 0.031; 0.016 is best guaranteed for these weights.
3 layers in 0.09 s (4.1 gradients) by the Gram engine. Gauss-Newton on 32
examples; loss 2.3."""

NARROW = """\
 layer                      ‖H‖     gap   verdict
──────────────────────────────────────────────────
 encoder.layers.0.         0.31    1.55   ok
 self_attn.out_proj
 embed = head               ~64   ~1.00   sharp
──────────────────────────────────────────────────
 network                     64           sharp

embed is 206 times sharper than
encoder.layers.0.self_attn.out_proj. Gradient
descent is unstable above lr = 2/‖H‖ = 0.031;
0.016 is best guaranteed for these weights.
encoder.layers.0.self_attn.out_proj's exact
Hessian is 1.5 times its Gauss-Newton
approximation. Not converged (marked ~): embed;
stopped after 3 products; raise max_products.
2 layers in 0.09 s (4.1 gradients) by the Lanczos
engine: the exact Hessian is asked for. Exact
Hessian and Gauss-Newton on 32 examples; loss 2.3.
Note: drop1 is in train mode.
Left out of 50 columns: weight."""


def test_a_report_at_80_columns():
    assert render_text(make_three_layers(), width=80) == WIDE


def test_a_report_at_50_columns_folds_names_and_leaves_out_the_least_telling_column():
    first = make_layer(
        "encoder.layers.0.self_attn.out_proj", 0.31, shape=(128, 128), approximation=make_estimate(0.2)
    )
    second = make_layer(
        "embed",
        64.0,
        aliases=("head",),
        top=make_estimate(64.0, 1.0, False),
        approximation=make_estimate(64.0),
    )
    report = make_report(
        first,
        second,
        curvature="both",
        engine="lanczos",
        engine_reason="the exact Hessian is asked for.",
        notes=("drop1 is in train mode.",),
    )
    assert render_text(report, width=50) == NARROW


@pytest.mark.parametrize("width", [36, 40, 50, 64, 80, 200])
def test_no_line_is_wider_than_asked_and_nothing_is_cut(width):
    report = example_report()
    spread = [replace(layer, spread=Spread((1.0, 2.0)), trace=make_estimate(1234.5)) for layer in report]
    text = render_text(replace(report, layers=tuple(spread)), width=width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert "…" not in text
    assert all(f" {layer.name} " in text and f" {layer.verdict}" in text for layer in report)


def test_the_printed_report_follows_the_terminal_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert str(make_three_layers()) == WIDE


def test_text_for_a_pipe_has_no_colour_and_text_for_a_terminal_has(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in render_text(make_three_layers(), width=80)
    assert "\x1b[33msharp" in render_text(make_three_layers(), width=80, color=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[33m" not in render_text(make_three_layers(), width=80, color=True)


def test_a_rich_console_prints_the_same_table():
    page = io.StringIO()
    Console(file=page, width=80, height=25, force_terminal=False, force_jupyter=False).print(
        make_three_layers()
    )
    assert [line.rstrip() for line in page.getvalue().splitlines()] == WIDE.splitlines()


def test_markup_and_control_characters_in_names_are_shown_and_not_obeyed():
    report = make_report(
        make_layer("[bold]x[/bold]", 1.0), make_layer("a\x1b[2J\n:smile:", 9.0), notes=("[red]\x07",)
    )
    text = render_text(report, width=100, color=False)
    assert " [bold]x[/bold] " in text
    assert r" a\x1b[2J\n:smile: " in text
    assert r"Note: [red]\x07" in text
    assert "\x1b" not in text


def test_columns_appear_only_when_they_have_something_to_say():
    plain = make_layer("fc1", 2.0)
    down = make_layer("fc2", 2.0, curvature="hessian", bottom=make_estimate(-1.5))
    spread = make_layer("fc3", 2.0, spread=Spread((1.0, 2.0, 3.0)))
    full = make_layer("fc4", 2.0, trace=make_estimate(5.0, converged=False), frobenius=make_estimate(3.0))
    heading = {
        row.name: render_text(make_report(row), 120).splitlines()[0].split("  ") for row in (plain, full)
    }
    assert "trace" not in "".join(heading["fc1"])
    assert "trace" in "".join(heading["fc4"])
    assert "‖H‖F" in "".join(heading["fc4"])
    assert "λmin … λmax" not in render_text(make_report(plain), 120)
    assert "-1.5 … 2 " in render_text(make_report(down), 120)
    assert "2 ± 0.58" in render_text(make_report(spread, batches=3), 120)
    assert "~5 " in render_text(make_report(full), 120)
    assert "Not converged (marked ~): fc4;" in make_report(full).verdict


@pytest.mark.parametrize(
    ("norms", "network", "sentence"),
    [
        (
            [],
            1.0,
            "No layer was measured. Gradient descent is unstable above lr = 2/‖H‖ = 2; 1 is best guaranteed",
        ),
        ([64.0], 64.0, "a has ‖H‖ = 64 (sharp). Gradient descent"),
        ([1.0, 1.2], 2.0, "Both layers are about equally sharp."),
        ([1.0, 1.2, 0.0], 2.0, "2 of 3 layers are about equally sharp. c has no curvature (‖H‖ = 0)"),
        (
            [1e-5, 1.0],
            2.0,
            "b is 1.0e+05 times sharper than a. a vanishes (‖H‖ is below 0.001): it hardly moves",
        ),
        ([1e-5, 1e-5, 1.0], 2.0, "a and b vanish (‖H‖ is below 0.001): they hardly move the loss."),
        ([1.0, 5000.0], 2.0, "b explodes: ‖H‖ is above 1000."),
        (
            [1.0, math.inf],
            math.inf,
            "b is not finite: the numbers overflow there. Start from smaller weights",
        ),
        ([1.0, math.nan], math.nan, "The network's ‖H‖ is nan: no learning rate is safe from this start."),
        ([0.0, 0.0], 0.0, "The network has no curvature, so it sets no limit to the learning rate."),
    ],
)
def test_the_verdict_fits_what_was_found(norms, network, sentence):
    layers = [make_layer(name, norm) for name, norm in zip("abc", norms, strict=False)]
    assert sentence in make_report(*layers, network=network).verdict


def test_a_network_that_curves_down_most_is_not_called_unstable():
    network = make_layer("network", 1.0, curvature="hessian", bottom=make_estimate(-4.0))
    verdict = make_report(make_layer(), network=network, curvature="hessian").verdict
    assert "curves down more than up (λ = -4): a step in these weights is sure to lower" in verdict
    assert "the loss up to lr = 2/‖H‖ = 0.5" in verdict
    assert "unstable" not in verdict


@pytest.mark.parametrize(
    ("approximations", "sentence"),
    [
        ((1.0, 2.0), "The exact Hessian and Gauss-Newton agree within 1 % on every layer."),
        ((1 / 2.6, 1.9), "a's exact Hessian is 2.6 times its Gauss-Newton approximation."),
        ((1.1, 8.0), "b's exact Hessian is 0.25 times its Gauss-Newton approximation."),
        ((1.0, 1.95), "b's exact Hessian is 1.03 times its Gauss-Newton approximation."),
    ],
)
def test_the_verdict_names_the_worst_gap(approximations, sentence):
    first, second = (make_estimate(value) for value in approximations)
    layers = make_layer("a", 1.0, approximation=first), make_layer("b", 2.0, approximation=second)
    assert sentence in make_report(*layers, curvature="both").verdict


@pytest.mark.parametrize(
    ("exact", "end"),
    [
        (1.004, "on every layer."),
        (2.6, "on every layer; for the network as a whole the exact one is 2.6 times as large."),
    ],
)
def test_a_gap_between_the_layers_is_not_passed_over(exact, end):
    layer = make_layer("a", 1.0, approximation=make_estimate(1.0))
    network = make_layer("network", exact, approximation=make_estimate(1.0))
    verdict = make_report(layer, network=network, curvature="both").verdict
    assert f"The exact Hessian and Gauss-Newton agree within 1 % {end}" in verdict


def test_the_cost_says_what_is_known():
    bare = make_report(make_layer(), seconds=None, gradients=None, examples=1)
    assert "1 layer by the Gram engine. Gauss-Newton on 1 example; loss 2.3." in render_text(bare, 120)
    batched = make_report(make_layer(), batches=4, examples=5000, engine="sampled")
    assert "by the sampled engine. Gauss-Newton on 5,000 examples in 4 batches" in render_text(batched, 120)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (9.996, "10"),
        (0.09996, "0.1"),
        (99950.0, "1.0e+05"),
        (99940.0, "99900"),
        (0.0001, "0.0001"),
        (0.00009994, "1.0e-04"),
        (-0.0, "0"),
        (-math.inf, "-inf"),
        (5e-324, "4.9e-324"),
    ],
)
def test_numbers_keep_three_figures_across_every_power_of_ten(number, text):
    assert format_number(number) == text


def test_one_more_name_is_named_rather_than_counted():
    assert join_names(["a", "b", "c", "d"]) == "a, b, c and d"
    assert join_names(["a"]) == "a"
