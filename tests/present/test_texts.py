"""What print(result) shows: one golden text for each kind, and what holds for every text."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from document_examples import (
    every_block,
    hostile_report,
    make_estimate,
    make_initialization,
    make_layer,
    make_report,
    three_layers,
)
from rich.cells import cell_len
from rich.console import Console

from hessinit.present import describe, to_rich, to_text
from hessinit.present.document import Column, Document, Section, Table
from hessinit.present.terminal import render_text
from hessinit.present.words import format_number, join_names
from hessinit.results.estimates import Spread
from hessinit.results.initialization import PlannedWeight, SchemePlan
from hessinit.results.quadratic_forms import QuadraticForm, QuadraticForms

REPORT = """\
 layer     weight        ‖H‖   verdict
───────────────────────────────────────
 fc1       (256, 784)   0.31   ok
 fc2       (256, 256)   1.84   ok
 fc3       (10, 256)      64   sharp
───────────────────────────────────────
 network   1,234        64.5   sharp

fc3 is 206 times sharper than fc1. Gradient descent is unstable above lr = 2/‖H‖
= 0.031; lr = 1/‖H‖ = 0.016 gives the largest guaranteed decrease.
3 layers in 0.09 s (4.1 gradients) by the Gram engine. Gauss-Newton on 32
examples; loss 2.3."""

NARROW = """\
 layer                      ‖H‖     gap   verdict
──────────────────────────────────────────────────
 encoder.layers.0.         0.31    1.55   ok
 self_attn.out_proj
 embed = head               ~64   ~1.00   sharp
──────────────────────────────────────────────────
 network                   64.5           sharp

embed is 206 times sharper than
encoder.layers.0.self_attn.out_proj. Gradient
descent is unstable above lr = 2/‖H‖ = 0.031; lr =
1/‖H‖ = 0.016 gives the largest guaranteed
decrease. encoder.layers.0.self_attn.out_proj's
exact Hessian is 1.5 times its Gauss-Newton
approximation. Not converged (marked ~): embed;
stopped; raise max_iterations.
2 layers in 0.09 s (4.1 gradients) by the Lanczos
engine: the exact Hessian is asked for. Exact
Hessian and Gauss-Newton on 32 examples; loss 2.3.
Note: drop1 is in train mode.
Left out of 50 columns: weight."""

INITIALIZATION = """\
 layer      scale   ‖H‖ before   after
───────────────────────────────────────
 fc1       × 1.21         0.31    12.4
 fc2       × 1.21         1.84      11
 fc3       × 1.21           64    12.8
───────────────────────────────────────
 network                  64.5    20.2

Met: ‖H‖ = 20.2 is within 5 % of the target.
Target: the network's ‖H‖ = κ/lr = 2/0.1 = 20.
All 3 layers are about equally sharp. Gradient descent is unstable above lr =
2/‖H‖ = 0.099; lr = 1/‖H‖ = 0.05 gives the largest guaranteed decrease.
Weights drawn by lsuv, all weights multiplied by one gain; 2 measurements in 0.2
s. Nothing was written, or this is a copy."""

PLAN = """\
 layer          fans          upstream            gain   dropout      std   remark
──────────────────────────────────────────────────────────────────────────────────────────────────────
 embed = head   1 → 64        tokens                 1       × 1    0.125
 qkv            64 → 3 × 64   layer_norm             1       × 1    0.125
 proj           256 → 64      gelu, dropout 0.1   1.53   × 0.949   0.0909   last of a residual branch
 old                                                                        frozen

he, normal: 3 weights; 1 unchanged.
Left out of 110 columns: weight."""

FORMS = """\
 layer   weight                  exact           Theorem 1   ratio    ≤0.5      ≤1    ≤1.5
───────────────────────────────────────────────────────────────────────────────────────────
 fc1     (512, 784)   0.00095 ± 0.0022   0.00105 ± 0.00015    0.90     0 %     0 %     0 %
 fc2     (10, 512)         0.28 ± 0.03         0.28 ± 0.03    1.00   100 %   100 %   100 %

gᵀHg in each layer along 2 random directions g of length 1: exact, and by Theorem 1 (vᵀH_z v, v the
first-order change of the output along g); mean ± standard error. ≤0.5: the fraction of directions
on which the two differ by at most half of Theorem 1's value.
The error of Theorem 1 is largest on fc1: the exact form is within 50 % of its value on 0 % of the
directions, and on average 0.9 times its value.
2 layers on 32 examples; loss 2.31."""

ADVICE = """\
 quantity           value   reason
────────────────────────────────────────────────────────────────────────────────────────────────────
 learning rate    0.00155   0.1/‖H‖ with ‖H‖ = 64.5: momentum makes steps 10 times as long.
 stable up to      0.0589   (2 + 2·0.9)/‖H‖: above it the steps grow on a quadratic of this
                            curvature.
 warmup          85 steps   lr = 0.1 is 1.7 times the stable learning rate; smaller first steps
                            give the curvature time to fall.

SGD(momentum=0.9) on fc1, fc2 and fc3 (1,234 parameters); Gauss-Newton on 32 examples; loss 2.3."""


def test_a_report_at_80_columns() -> None:
    assert to_text(three_layers(), 80) == REPORT


def test_a_report_at_50_columns_folds_names_and_leaves_out_the_least_important_column() -> None:
    long = "encoder.layers.0.self_attn.out_proj"
    first = make_layer(long, 0.31, shape=(128, 128), approximation=make_estimate(0.2))
    doubtful = {"top": make_estimate(64.0, 1.0, False), "approximation": make_estimate(64.0)}
    second = make_layer("embed", 64.0, aliases=("head",), **doubtful)
    report = make_report(
        first,
        second,
        curvature="both",
        engine="lanczos",
        engine_reason="the exact Hessian is asked for.",
        notes=("drop1 is in train mode.",),
    )
    assert to_text(report, 50) == NARROW


def test_an_initialization() -> None:
    assert to_text(make_initialization(), 80) == INITIALIZATION


def test_a_plan() -> None:
    rows = [
        PlannedWeight(name="embed", aliases=("head",), shape=(65, 64), fan_in=(1.0,), fan_out=(64.0,),
                      upstream="tokens", std=(0.125,)),
        PlannedWeight(name="qkv", shape=(192, 64), fan_in=(64.0,) * 3, fan_out=(64.0,) * 3,
                      upstream="layer_norm", std=(0.125,) * 3),
        PlannedWeight(name="proj", shape=(64, 256), fan_in=(256.0,), fan_out=(64.0,), std=(0.0909,),
                      upstream="gelu, dropout 0.1", gain=1.5335, dropout_factor=0.9487, closes_residual=True),
        PlannedWeight(name="old", shape=(64, 64), unchanged="frozen"),
    ]  # fmt: skip
    assert to_text(SchemePlan(scheme="he", distribution="normal", layers=tuple(rows)), 110) == PLAN


def test_advice() -> None:
    assert to_text(three_layers().advice("momentum", lr=0.1), 100) == ADVICE


def test_quadratic_forms() -> None:
    layers = (
        QuadraticForm(
            name="fc1", shape=(512, 784), exact=(0.0031, -0.0012), theorem1=(0.0012, 0.0009), length=(1, 1)
        ),
        QuadraticForm(name="fc2", shape=(10, 512), exact=(0.31, 0.25), theorem1=(0.31, 0.25), length=(1, 1)),
    )
    forms = QuadraticForms(layers=layers, directions="random", draws=2, loss=2.31, examples=32, seed=0)
    assert to_text(forms, 100) == FORMS
    one = replace(forms, layers=forms.layers[1:], directions="gradient", draws=1)
    assert "along the loss gradient g: exact" in to_text(one, 200)
    assert "Theorem 1 and the exact form agree within 1 % on every layer." in to_text(one, 200)
    overflow = replace(layers[0], name="[red]", exact=(math.inf,), theorem1=(math.inf,), length=(1,))
    text = to_text(replace(one, layers=(overflow,)), 80)
    assert "The numbers of [red] overflow; pass dtype=torch.float64." in text


@pytest.mark.parametrize("width", [36, 40, 50, 64, 80, 200])
def test_no_line_is_wider_than_asked_and_no_short_name_is_cut(width: int) -> None:
    report = three_layers()
    spread = [replace(layer, spread=Spread((1.0, 2.0)), trace=make_estimate(1234.5)) for layer in report]
    text = to_text(replace(report, layers=tuple(spread)), width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert all(f" {layer.name} " in text and f" {layer.verdict}" in text for layer in report)


def shown(columns: list[Column], width: int) -> str:
    return render_text(
        Document(title="", verdict=[], sections=[Section("", [Table("", columns, 0, False)])]), width
    )


@pytest.mark.parametrize("width", [16, 20, 26, 32, 40])
@pytest.mark.parametrize("is_number", [False, True])
def test_numbers_stay_whole_at_any_width(width: int, is_number: bool) -> None:
    names = Column("name", ["0", "12345"] if is_number else ["encoder.0", "network"], 9, is_number)
    numbers = [Column("loss", ["2.31", "0.01"], 7), Column("‖H‖", ["0.478", "123.4"], 8)]
    text = shown([names, *numbers, Column("limit", ["0.15", "1.01"], 8)], width)
    table, _, rest = text.partition("Left out of")
    assert max(map(cell_len, table.splitlines())) <= width
    for column in numbers:
        assert all((cell in table.split()) == (column.heading not in rest) for cell in column.cells)
    assert "123.4" in table


def test_of_equally_important_columns_the_last_is_left_out_first() -> None:
    columns = [Column(name, ["12345"], 8) for name in ("step", "norm", "limit")]
    assert shown(columns, 20).endswith("columns: limit.")


def test_a_long_name_is_cut_in_tables_and_sentences() -> None:
    long = "encoder" * 1400
    report = make_report(make_layer(long, 1.0), make_layer("7" + long, 1e5), make_layer("c", 1e6))
    assert len(to_text(report, 80).splitlines()) < 30
    assert len(describe(report).verdict[0]) < 800
    assert join_names(["a", "b", "c", "d"]) == "a, b, c and d"
    assert len(join_names([long, long])) < 200


def test_text_for_a_terminal_has_colour_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in to_text(three_layers(), 80)
    assert "\x1b[33msharp" in to_text(three_layers(), 80, color=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[33m" not in to_text(three_layers(), 80, color=True)
    monkeypatch.setenv("COLUMNS", "80")
    assert str(three_layers()) == REPORT


def test_a_rich_console_prints_the_same_text() -> None:
    page = io.StringIO()
    console = Console(file=page, width=80, height=25, force_terminal=False, force_jupyter=False)
    console.print(*to_rich(three_layers(), 80), sep="\n")
    assert [line.rstrip() for line in page.getvalue().splitlines()] == REPORT.splitlines()


def test_markup_and_control_characters_are_shown_and_not_obeyed() -> None:
    names = make_layer("[bold]x[/bold]", 1.0), make_layer("a\x1b[2J\n:smile:", 9.0)
    text = to_text(make_report(*names, notes=("[red]\x07",)), 100)
    assert " [bold]x[/bold] " in text
    assert r" a\x1b[2J\n:smile: " in text
    assert r"Note: [red]\x07" in text
    for shown in (text, to_text(hostile_report(), 100), render_text(every_block(), 100)):
        assert not set(shown) & {"\x1b", "\x07", "\u2028", "\u202e"}


def test_columns_appear_only_when_they_say_something() -> None:
    down = make_layer("b", 2.0, curvature="hessian", bottom=make_estimate(-1.5))
    spread = make_layer("c", 2.0, spread=Spread((1.0, 2.0, 3.0)))
    full = make_layer("d", 2.0, trace=make_estimate(5.0, converged=False), frobenius=make_estimate(3.0))
    plain = to_text(make_report(make_layer()), 120)
    assert not any(heading in plain for heading in ("trace", "‖H‖F", "λmin", "gap", "per batch"))
    assert "-1.5 … 2 " in to_text(make_report(down), 120)
    assert "2 ± 0.58" in to_text(make_report(spread, batches=3), 120)
    text = to_text(make_report(full), 120)
    assert "trace" in text
    assert "‖H‖F" in text
    assert "~5 " in text
    assert "Not converged (marked ~): d;" in text


@pytest.mark.parametrize(
    ("norms", "network", "sentence"),
    [
        ([], 1.0, "No layer was measured. Gradient descent is unstable above lr = 2/‖H‖ = 2; lr = 1/‖H‖ = 1"),
        ([64.0], 64.0, "a has ‖H‖ = 64 (sharp). Gradient descent"),
        ([1.0, 1.2], 2.0, "Both layers are about equally sharp."),
        ([1.0, 1.2, 0.0], 2.0, "2 of 3 layers are about equally sharp. c has no curvature (‖H‖ = 0)"),
        ([1e-5, 1.0], 2.0, "b is 1.0e+05 times sharper than a. a vanishes (‖H‖ is below 0.001) and hardly"),
        ([1e-5, 1e-5, 1.0], 2.0, "a and b vanish (‖H‖ is below 0.001) and hardly change the loss."),
        ([1.0, 5000.0], 2.0, "b explodes: ‖H‖ is above 1000."),
        ([1.0, math.inf], math.inf, "‖H‖ of b is not finite: the numbers overflow. Initialize with smaller"),
        ([1.0, math.nan], math.nan, "The network's ‖H‖ is nan: no learning rate is stable."),
        ([0.0, 0.0], 0.0, "The network has no curvature, so it sets no limit to the learning rate."),
    ],
)  # fmt: skip
def test_the_verdict_fits_the_norms(norms: list[float], network: float, sentence: str) -> None:
    layers = [make_layer(name, norm) for name, norm in zip("abc", norms, strict=False)]
    assert sentence in describe(make_report(*layers, network=network)).verdict[0]


@pytest.mark.parametrize(
    ("approximations", "network", "sentence"),
    [
        ((1.0, 2.0), 64.5, "The exact Hessian and Gauss-Newton agree within 1 % on every layer."),
        ((1 / 2.6, 1.9), 64.5, "a's exact Hessian is 2.6 times its Gauss-Newton approximation."),
        ((1.1, 8.0), 64.5, "b's exact Hessian is 0.25 times its Gauss-Newton approximation."),
        ((1.0, 1.95), 64.5, "b's exact Hessian is 1.03 times its Gauss-Newton approximation."),
        ((1.0, 2.0), 24.8, "on every layer; for the whole network the exact one is 2.6 times as large."),
    ],
)
def test_the_verdict_names_the_largest_gap(
    approximations: tuple[float, float], network: float, sentence: str
) -> None:
    first, second = (make_estimate(value) for value in approximations)
    layers = make_layer("a", 1.0, approximation=first), make_layer("b", 2.0, approximation=second)
    whole = make_layer("network", 64.5, approximation=make_estimate(network))
    assert sentence in describe(make_report(*layers, network=whole, curvature="both")).verdict[0]


def test_a_network_of_mostly_negative_curvature_is_not_called_unstable() -> None:
    network = make_layer("network", 1.0, curvature="hessian", bottom=make_estimate(-4.0))
    (verdict,) = describe(make_report(make_layer(), network=network, curvature="hessian")).verdict
    assert "(λ = -4) is the largest in size: a gradient step is guaranteed to lower the loss up to" in verdict
    assert "lr = 2/‖H‖ = 0.5" in verdict
    assert "unstable" not in verdict


def test_the_cost_says_what_is_known() -> None:
    bare = make_report(make_layer(), seconds=None, gradients=None, examples=1)
    assert "1 layer by the Gram engine. Gauss-Newton on 1 example; loss 2.3." in to_text(bare, 120)
    batched = make_report(make_layer(), batches=4, examples=5000, engine="sampled")
    assert "by the sampled engine. Gauss-Newton on 5,000 examples in 4 batches" in to_text(batched, 120)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (9.996, "10"), (0.09996, "0.1"), (99950.0, "1.0e+05"), (99940.0, "99900"), (0.0001, "0.0001"),
        (0.00009994, "1.0e-04"), (-0.0, "0"), (-math.inf, "-inf"), (5e-324, "4.9e-324"),
    ],
)  # fmt: skip
def test_numbers_keep_three_figures_across_every_power_of_ten(number: float, text: str) -> None:
    assert format_number(number) == text


def test_what_cannot_be_described_is_refused_with_what_can() -> None:
    with pytest.raises(TypeError, match="a dict cannot be described; what can is a CurvatureReport"):
        describe({})
