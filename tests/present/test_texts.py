"""What print(result) shows. The other kinds of results have their golden texts in tests/cli/expected."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from hessinit.present import describe, to_text, words
from hessinit.present.document import Column, Document, Section, Table
from hessinit.present.terminal import render_text
from hessinit.results.curvature_report import CurvatureReport, Spread
from hessinit.results.initialization import Initialization, PlannedWeight, SchemePlan
from hessinit_paper.quadratic_forms import QuadraticForm, QuadraticForms
from result_examples import (
    LONG,
    every_block,
    example_comparison,
    example_reproduction,
    example_tracking,
    hostile_report,
    make_compared,
    make_estimate,
    make_initialization,
    make_layer,
    make_report,
    make_sweep,
    make_symmetric,
    make_three_layers,
    make_trial,
)

INF, NAN = math.inf, math.nan

REPORT = """\
 layer     weight        ‖H‖   finding
───────────────────────────────────────────
 fc1       (256, 784)   0.31   no gradient
 fc2       (256, 256)   1.84
 fc3       (10, 256)      64
───────────────────────────────────────────
 network   1,234        64.5

Not sound:
fc1 gets no gradient. Use it.
fc3 is 206 times sharper than fc1. On a quadratic of this curvature, plain
gradient descent diverges above lr = 2/‖H‖ = 0.031. A network is not a
quadratic: advise tries rates, also for momentum and Adam.
3 layers in 0.09 s (4.1 gradients) by the Gram engine. Gauss-Newton on 32
examples; loss 2.3."""

NARROW = """\
 layer                      weight    ‖H‖     gap
──────────────────────────────────────────────────
 encoder.layers.0.self_at   (4, 3)   0.31    1.55
 tn.out_proj
 embed = head               (4, 3)    ~64   ~1.00
──────────────────────────────────────────────────
 network                    1,234    64.5

embed is 206 times sharper than
encoder.layers.0.self_attn.out_proj. On a
quadratic of this curvature, plain gradient
descent diverges above lr = 2/‖H‖ = 0.031. A
network is not a quadratic: advise tries rates,
also for momentum and Adam.
encoder.layers.0.self_attn.out_proj's exact
Hessian is 1.55 times its Gauss-Newton
approximation. Not converged (marked ~): embed;
stopped; raise max_iterations.
2 layers in 0.09 s (4.1 gradients) by the Lanczos
engine: the exact Hessian is asked for. Exact
Hessian and Gauss-Newton on 32 examples; loss 2.3.
Note: drop1 is in train mode."""

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

gᵀHg in each layer along 2 random directions g: exact, and by Theorem 1 (vᵀH_z v, v the first-order
change of the output along g); mean ± standard error. ≤0.5: the fraction of directions with at most
that relative error.
The error of Theorem 1 is largest on fc1: the exact form is within 50 % of it on 0 % of the
directions, and 0.9 times its value on average.
2 layers on 32 examples; loss 2.31."""

SOUND = (
    "Sound: every layer gets a gradient, the examples stay apart through the depth, and the loss is not far "
    "above that of the best constant output."
)

ADVICE = """\
learning rate: 0.00155

 quantity          value   reason
────────────────────────────────────────────────────────────────────────────────────────────────────
 learning rate   0.00155   0.1/‖H‖ with ‖H‖ = 64.5: momentum makes steps 10 times as long.
 stable up to     0.0589   (2 + 2·0.9)/‖H‖: above it the steps grow on a quadratic of this
                           curvature.
 warmup             none   lr = 0.1 is above the advised rate; whether a warmup helps there was not
                           tried.

SGD(momentum=0.9) on fc1, fc2 and fc3 (1,234 parameters); Gauss-Newton on 32 examples; loss 2.3."""

COMPARED = """\
 weights         lr   steps   score   remark
─────────────────────────────────────────────
 hessinit       0.1       6    0.25   chosen
 your weights   0.1       6     1.9

The new weights were chosen: they came to 0.25 in 6 trial steps on fresh mini-batches, your own to
1.9. The new ones: the network's ‖H‖ is within 5 % of 20.
Target: the network's ‖H‖ = κ/lr = 2/0.1 = 20.
2 trials, 12 training steps in 0.2 s. Score: the mean loss of the last third of the steps, on
held-out batches where batches repeat. Nothing was written, or this is a copy."""

AUTO = """\
learning rate: 0.1

 weights          lr   steps   score   remark
──────────────────────────────────────────────────────────
 hessinit        0.1       6    0.25   chosen
 your weights    0.1       6     1.9
 your weights   0.05       2     2.1
 your weights    0.2       3       –   diverged at step 4

The new weights were chosen: they came to 0.25 in 6 trial steps on fresh mini-batches, your own to
1.9. The new ones: the network's ‖H‖ is within 5 % of 20.
Target: the network's ‖H‖ = κ/lr = 2/0.1 = 20.
4 trials, 17 training steps in 0.2 s. Score: the mean loss of the last third of the steps, on
held-out batches where batches repeat. Nothing was written, or this is a copy."""

SYMMETRIC = """\
 block                              factor   ‖H‖ before   after
────────────────────────────────────────────────────────────────
 3 scale-free weights: 0, 4 and 8    × 0.2          1.2      30
 13 against the gains of 9             × 2          120    29.9

Met: the scale-free weights have ‖H‖ = 30, within 5 % of 30.
Target: the scale-free weights' ‖H‖ = κ/lr = 3/0.1 = 30.
24 trial steps on this batch at lr 0.1: the loss fell from 2.4 to 0.3.
‖H‖ of a block: of its weights together, as the optimizer sees it (preconditioned for Adam). These
factors do not change what the network computes.
Weights drawn by lsuv, scaled along symmetries; done in 0.2 s. Nothing was written, or this is a
copy."""

ADAM = """\
Steps of adam do not grow with the gradient: no curvature is asked for.
24 trial steps on this batch at lr 0.001: the loss fell from 2.4 to 0.3.
Weights drawn by lsuv, nothing scaled; done in 0.2 s. Nothing was written, or this is a copy."""


def narrow_report() -> CurvatureReport:
    first = make_layer("encoder.layers.0.self_attn.out_proj", 0.31, approximation=make_estimate(0.2))
    doubtful = {"top": make_estimate(64.0, 1.0, False), "approximation": make_estimate(64.0)}
    second = make_layer("embed", 64.0, aliases=("head",), **doubtful)
    engine = {"engine": "lanczos", "engine_reason": "the exact Hessian is asked for."}
    return make_report(first, second, curvature="both", notes=("drop1 is in train mode.",), **engine)


def plan() -> SchemePlan:
    rows = [
        PlannedWeight(name="embed", aliases=("head",), shape=(65, 64), fan_in=(1.0,), fan_out=(64.0,),
                      upstream="tokens", std=(0.125,)),
        PlannedWeight(name="qkv", shape=(192, 64), fan_in=(64.0,) * 3, fan_out=(64.0,) * 3,
                      upstream="layer_norm", std=(0.125,) * 3),
        PlannedWeight(name="proj", shape=(64, 256), fan_in=(256.0,), fan_out=(64.0,), std=(0.0909,),
                      upstream="gelu, dropout 0.1", gain=1.5335, dropout_factor=0.9487, closes_residual=True),
        PlannedWeight(name="old", shape=(64, 64), unchanged="frozen"),
    ]  # fmt: skip
    return SchemePlan(scheme="he", distribution="normal", layers=tuple(rows))


def forms() -> QuadraticForms:
    first = {"exact": (0.0031, -0.0012), "theorem1": (0.0012, 0.0009), "length": (1.0, 1.0)}
    second = {"exact": (0.31, 0.25), "theorem1": (0.31, 0.25), "length": (1.0, 1.0)}
    rows = {"fc1": ((512, 784), first), "fc2": ((10, 512), second)}
    layers = tuple(QuadraticForm(name=name, shape=shape, **given) for name, (shape, given) in rows.items())
    return QuadraticForms(layers=layers, directions="random", draws=2, loss=2.31, examples=32, seed=0)


def adam() -> Initialization:
    """Nothing was asked of the curvature, so that nothing was measured."""
    given = {"before": None, "after": None, "target": None, "kappa": None, "scales": {"fc1": 1.0}}
    reason = "steps of adam do not grow with the gradient: no curvature is asked for"
    given |= {"survival": make_trial("present weights", 24, 0.3, lr=0.001), "lr": 0.001, "reason": reason}
    return make_initialization(**given, scaling="none", measurements=())


SWEEP = make_sweep({1.0: (INF, INF), 0.1: (1.0, 1.2)}, {1.0: 80.0, 0.1: 8.0})
TRACK = example_tracking()
GOLDEN = [
    (make_three_layers(), 80, REPORT), (narrow_report(), 50, NARROW), (plan(), 110, PLAN),
    (forms(), 100, FORMS), (make_three_layers().advice("momentum", lr=0.1), 100, ADVICE),
    (make_compared(), 100, COMPARED), (make_compared(searched=(0.05, 0.2), chose_lr=True), 100, AUTO),
    (make_symmetric(), 100, SYMMETRIC), (adam(), 100, ADAM),
]  # fmt: skip


@pytest.mark.parametrize(("result", "width", "text"), GOLDEN)
def test_a_result_prints_its_golden_text(result: Any, width: int, text: str) -> None:
    assert to_text(result, width) == text


@pytest.mark.parametrize("width", [36, 60, 100])
def test_no_line_is_wider_than_asked_and_the_best_rate_stays(width: int) -> None:
    for result in (example_comparison(), SWEEP, TRACK, example_reproduction(), hostile_report()):
        assert max(map(cell_len, to_text(result, width).splitlines())) <= width
    assert "lr 0.3" in to_text(example_comparison(), width).splitlines()[0]
    assert "Left out of 60 columns: sharpest layer, training loss." in to_text(TRACK, 60)


@pytest.mark.parametrize("width", [16, 26, 40])
@pytest.mark.parametrize("is_number", [False, True])
def test_numbers_stay_whole_at_any_width(width: int, is_number: bool) -> None:
    names = Column("name", ["0", "12345"] if is_number else ["encoder.0", "network"], 9, is_number)
    numbers = [Column("loss", ["2.31", "0.01"], 7), Column("‖H‖", ["0.478", "123.4"], 8)]
    table = Table("", [names, *numbers, Column("limit", ["0.15", "1.01"], 8)])
    text = render_text(Document(title="", verdict=[], sections=[Section("", [table])]), width)
    shown, _, rest = text.partition("Left out of")
    assert max(map(cell_len, shown.splitlines())) <= width
    for column in numbers:
        assert all((cell in shown.split()) == (column.heading not in rest) for cell in column.cells)
    assert "123.4" in shown


def test_text_has_colour_unless_no_color_is_set_and_a_rich_console_prints_the_same(monkeypatch: Any) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31mno gradient" in to_text(make_three_layers(), 80, color=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[33m" not in to_text(make_three_layers(), 80, color=True)
    page = io.StringIO()
    console = Console(file=page, width=80, height=25, force_terminal=False, force_jupyter=False)
    console.print(make_three_layers())
    assert [line.rstrip() for line in page.getvalue().splitlines()] == REPORT.splitlines()


def test_printing_draws_no_random_number_when_it_imports_what_it_needs() -> None:
    script = (
        "import random, sys; from result_examples import REPORT; assert 'rich.style' not in sys.modules;"
        "state = random.getstate(); str(REPORT); assert random.getstate() == state"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])


def test_markup_and_control_characters_are_shown_and_not_obeyed_and_long_names_are_cut() -> None:
    names = make_layer("[bold]x[/bold]", 1.0), make_layer("a\x1b[2J\n:smile:", 9.0)
    text = to_text(make_report(*names, notes=("[red]\x07",)), 100)
    assert all(part in text for part in (" [bold]x[/bold] ", r" a\x1b[2J\n:smile: ", r"Note: [red]\x07"))
    for shown in (text, to_text(hostile_report(), 100), render_text(every_block(), 100)):
        assert not set(shown) & {"\x1b", "\x07", "\u2028", "\u202e"}
    report = make_report(make_layer(LONG, 1.0), make_layer("7" + LONG, 1e5), make_layer("c", 1e6))
    assert len(to_text(report, 80).splitlines()) < 30
    assert len(describe(report).verdict[0]) < 800


def test_columns_appear_only_when_they_say_something() -> None:
    plain = to_text(make_report(make_layer()), 120)
    assert not any(heading in plain for heading in ("trace", "‖H‖F", "λmin", "gap", "per batch"))
    down = make_layer("b", 2.0, curvature="hessian", bottom=make_estimate(-1.5))
    rough, spread = make_estimate(5.0, converged=False), Spread((1.0, 2.0, 3.0))
    full = make_layer("d", 2.0, trace=rough, frobenius=make_estimate(3.0), spread=spread)
    text = to_text(make_report(down, full, batches=4, examples=5000, engine="sampled"), 120)
    shown = "-1.5 … 2", "2.00 ± 0.58", "‖H‖F", "~5", "Not converged (marked ~): d;", "on 5,000 examples in 4"
    assert all(part in text for part in shown)


@pytest.mark.parametrize(
    ("norms", "network", "sentence"),
    [
        ([], 1.0, "No layer was measured. On a quadratic of this curvature, plain gradient descent diverges"),
        ([64.0], 64.0, "above lr = 2/‖H‖ = 0.031. A network is not a quadratic: advise tries rates"),
        ([64.0], 64.0, "a has ‖H‖ = 64. On a quadratic of this curvature, plain gradient descent diverges"),
        ([1.0, 1.2], 2.0, "The 2 layers are about equally sharp."),
        ([1.0, 1.2, 0.0], 2.0, "2 of 3 layers are about equally sharp. ‖H‖ of c is 0: the loss has no"),
        ([0.001, 0.002, 1.0], 2.0, "c is 1000 times sharper than a. "),
        # As an embedding and a query: no scale makes them alike.
        ([1e-5, 1e-5, 1.0], 2.0, "c is the sharpest layer, with ‖H‖ = 1. "),
        ([1.0, INF], INF, "‖H‖ of b is not finite: the numbers overflow. Initialize with smaller"),
        ([1.0, NAN], NAN, "The network's ‖H‖ is nan: no learning rate is stable."),
        ([0.0, 0.0], 0.0, "The network has no curvature, so it sets no limit to the learning rate."),
    ],
)  # fmt: skip
def test_the_verdict_fits_the_norms(norms: list[float], network: float, sentence: str) -> None:
    layers = [make_layer(name, norm) for name, norm in zip("abc", norms, strict=False)]
    verdict = describe(make_report(*layers, network=network)).verdict[0]
    assert sentence in verdict
    # Whether a rate lowers the loss is said of a trial alone.
    assert "guaranteed" not in verdict
    assert "times sharper" not in verdict or max(norms) <= 1000 * min(norm for norm in norms if norm)


@pytest.mark.parametrize(
    ("findings", "first"),
    [
        (make_three_layers().findings, ["Not sound:", "fc1 gets no gradient. Use it."]),
        ((), [SOUND]),
        (None, []),
    ],
)  # fmt: skip
def test_the_first_sentence_of_a_report_is_whether_the_network_is_sound(findings: Any, first: Any) -> None:
    verdict = describe(replace(make_three_layers(), findings=findings)).verdict
    assert verdict[:-1] == first  # and of norms and rates the rest
    assert verdict[-1].startswith("fc3 is 206 times sharper than fc1. On a quadratic")


@pytest.mark.parametrize(
    ("approximations", "network", "sentence"),
    [
        ((1.0, 2.0), 64.5, "The exact Hessian and Gauss-Newton agree within 1 % on every layer."),
        ((1 / 2.6, 1.9), 64.5, "a's exact Hessian is 2.60 times its Gauss-Newton approximation."),
        ((1.1, 8.0), 64.5, "b's exact Hessian is 0.25 times its Gauss-Newton approximation."),
        ((1.0, 2.0), 24.8, "on every layer; for the whole network the exact one is 2.60 times as large."),
    ],
)
def test_the_verdict_names_the_largest_gap(approximations: Any, network: float, sentence: str) -> None:
    first, second = (make_estimate(value) for value in approximations)
    layers = make_layer("a", 1.0, approximation=first), make_layer("b", 2.0, approximation=second)
    whole = make_layer("network", 64.5, approximation=make_estimate(network))
    assert sentence in describe(make_report(*layers, network=whole, curvature="both")).verdict[0]


def test_a_network_of_mostly_negative_curvature_is_not_called_unstable() -> None:
    network = make_layer("network", 1.0, curvature="hessian", bottom=make_estimate(-4.0))
    (verdict,) = describe(make_report(make_layer(), network=network, curvature="hessian")).verdict
    size = "The most negative eigenvalue (λ = -4) is the largest in size: on a quadratic, a gradient step is "
    assert f"{size}guaranteed to lower the loss up to lr = 2/‖H‖ = 0.5. A network is not a" in verdict
    assert "diverges" not in verdict


def test_quadratic_forms_say_where_theorem_1_is_wrong() -> None:
    one = replace(forms(), layers=forms().layers[1:], directions="gradient", draws=1)
    assert "Theorem 1 and the exact form agree within 1 % on every layer." in to_text(one, 200)
    overflow = replace(forms().layers[0], name="[red]", exact=(INF,), theorem1=(INF,), length=(1,))
    assert "The numbers of [red] overflow; pass dtype" in to_text(replace(one, layers=(overflow,)), 80)


def test_words() -> None:
    numbers = {
        9.996: "10", 0.09996: "0.1", 99950.0: "1.0e+05", 99940.0: "99900", 0.0001: "0.0001",
        0.00009994: "1.0e-04", -0.0: "0", -INF: "-inf", 5e-324: "4.9e-324",
    }  # fmt: skip
    assert list(map(words.format_number, numbers)) == list(numbers.values())
    assert [words.format_ratio(x) for x in (1.0, 2.6149, 206.45, 0.004)] == ["1.00", "2.61", "206", "0.004"]
    assert [words.format_range((NAN, 2.0, 1.0)), words.format_range((NAN,))] == ["1 to 2", ""]
    assert words.shorten("encoder.layers.11.out_proj", 13) == "encode…t_proj"
    assert [words.join_names("abcd"), words.join_names("abcde")] == ["a, b, c and d", "a, b, c and 2 more"]
    assert words.looks(["he", "he+warmup"])["he+warmup"] == ("blue", True)
    assert words.ramp([0.1, 1.0, 0.01]) == ["ramp:0.5", "ramp:1", "ramp:0"]
    with pytest.raises(TypeError, match="a dict cannot be described; what can is a CurvatureReport"):
        describe({})
