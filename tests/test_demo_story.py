"""What the demo says follows from its numbers, whoever is ahead; its choices keep to the rule they state."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call, jacrev

from hessinit import Tracking, measure
from hessinit.demo import problem
from hessinit.demo.network import LEARNING_RATE, TRAINED_ON, build_network
from hessinit.demo.trying import STEPS, prepare, train
from hessinit.digits import load_digits
from hessinit.present.demonstration import (
    GUESSING,
    STARTS,
    Story,
    Try,
    average_losses,
    conclude_pair,
    conclude_rates,
    conclude_seeds,
)
from hessinit.present.demonstration_figure import demonstration_png, draw_demonstration
from hessinit.present.demonstration_text import draw_bars, pair_renderables, seeds_renderables
from hessinit.present.grid import render
from hessinit.present.initialization_example import example_initialization
from hessinit.present.page.content import LineChart, RateLine, Table
from hessinit.present.page.demonstration import demonstration_page
from hessinit.present.page.render import render_page
from hessinit.results.track_record import TrackedPoint


def make_story(**losses: list[float]) -> Story:
    """Final losses of two seeds by start; a loss of 1 reads half of the digits right."""
    tries = [
        Try(start=start, seed=seed, first_loss=2.5, final_loss=loss, accuracy=1 / (1 + loss))
        for start, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    return Story(
        lr=0.3, seed=0, steps=300, batch_size=64, trained_on=1437, held_out=360, tries=tuple(tries)
    )  # fmt: skip


def make_tracking(losses: list[float], name: str) -> Tracking:
    points = [
        TrackedPoint(
            step=step, seconds=1.0, measuring_seconds=0.1, loss=1.0, lr=0.3, norm=norm, error=0.0,
            converged=True, lr_times_norm=0.3 * norm, stable_learning_rate=2 / norm,
            lr_over_limit=0.15 * norm,
        )
        for step, norm in ((0, 13.0), (10, 4.0))
    ]  # fmt: skip
    return Tracking(
        points=tuple(points), losses=tuple(enumerate(losses, 1)), curvature="gauss-newton", name=name
    )


AHEAD = make_story(default=[1.4, 1.5], he=[0.1, 0.1], lsuv=[0.004, 0.02], hessinit=[0.007, 0.007])
PAIR = [
    ("PyTorch's default", make_tracking([2.3] * 15 + [1.4] * 15, "default")),
    ("hessinit", make_tracking([2.5] * 10 + [0.1] * 10 + [0.007] * 10, "hessinit")),
]


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (0.007, 1.4, "hessinit's start is ahead: PyTorch's ends at 200 times its loss."),
        (1.4, 0.7, "PyTorch's start is ahead: hessinit's ends at 2 times its loss."),
        (0.7, 0.8, "A tie: both starts end at about the same loss."),
        (0.8, 0.7, "A tie: both starts end at about the same loss."),
        (0.1, 2.3, "hessinit's start trains; PyTorch's does not get below guessing (2.3)."),
        (math.nan, 0.1, "PyTorch's start trains; hessinit's does not get below guessing (2.3)."),
        (24.0, 0.1, "PyTorch's start trains; hessinit's does not get below guessing (2.3)."),
        (24.0, math.inf, "Neither start gets below guessing (2.3): take another --lr."),
    ],
)
def test_the_verdict_on_the_two_follows_from_their_losses(ours: float, theirs: float, said: str) -> None:
    verdict = conclude_pair(make_story(default=[theirs], hessinit=[ours]))
    assert verdict.startswith(f"{said} After 300 steps at lr = 0.3 the loss is ")


def test_the_verdict_has_the_losses_and_what_is_read_right() -> None:
    assert conclude_pair(make_story(default=[1.0], hessinit=[0.25])).endswith(
        "After 300 steps at lr = 0.3 the loss is 0.25 from hessinit's start and 1 from PyTorch's; of 360 "
        "held-out digits 80 % and 50 % are read right."
    )


def test_over_the_seeds_the_lowest_median_is_named_whoever_has_it() -> None:
    assert conclude_seeds(AHEAD) == (
        "Over 2 seeds the lowest median loss is that of hessinit, 0.007; LSUV 0.012, He 0.1, PyTorch's "
        "default 1.4. hessinit's loss is the lower one against PyTorch's default in 2, He in 2, LSUV in 1 of "
        "2 seeds."
    )
    behind = make_story(default=[0.1, 0.1], he=[24.0, math.nan], lsuv=[0.2, 0.2], hessinit=[2.3, 0.3])
    assert conclude_seeds(behind) == (
        "Over 2 seeds the lowest median loss is that of PyTorch's default, 0.1; LSUV 0.2, hessinit 1.3, He "
        "inf. hessinit's loss is the lower one against PyTorch's default in 0, He in 2, LSUV in 0 of 2 "
        "seeds. Not below guessing, of 2: He 2, hessinit 1."
    )


def test_the_place_of_the_rate_is_told_for_both_starts() -> None:
    result = replace(example_initialization(), lr=0.1, kappa=4.0)
    before, after = result.before, result.after
    assert before is not None
    assert after is not None
    said = conclude_rates(result)
    for whose, report in (("PyTorch's start", before), ("hessinit's start", after)):
        stable = 2 / report.network.norm
        word = "is stable up to" if stable < 0.1 else "would stand"
        assert f"{whose} {word} {float(f'{stable:.3g}'):g}" in said
    assert said.endswith("It aims at lr·‖H‖ = 4, since the curvature usually falls in the first steps.")


def test_loss_curves_are_averaged_up_to_where_they_break_off() -> None:
    tracking = make_tracking([2.0] * 5 + [4.0] * 5 + [1.0] * 4 + [math.nan], "x")
    assert average_losses(tracking) == [(5.5, 3.0), (12.5, 1.0)]


def test_bars_share_one_logarithmic_scale_and_mark_what_is_not_finite() -> None:
    assert draw_bars([[100.0, 10.0, 1.0], [1.0, 1.0, math.inf]], 3) == ["█▅▁", "▁▁x"]
    assert draw_bars([[1.0, 1.0]], 2) == ["██"]
    assert draw_bars([[8.0] * 50 + [1.0] * 50], 4, "_#") == ["##__"]
    assert draw_bars([[1.0, 0.5, 0.25, 0.125], [1.0, 1.0]], 4)[1] == "██xx"


def test_the_pair_in_a_terminal() -> None:
    trackings = [tracking for _, tracking in PAIR]
    assert (
        render(pair_renderables(AHEAD, trackings, 80), 80)
        == """\
 training loss       step 1 to 300                  first    last   right
──────────────────────────────────────────────────────────────────────────
 PyTorch's default   ██████████████▇▇▇▇▇▇▇▇▇▇▇▇▇▇     2.5     1.4    42 %
 hessinit            ██████████▄▄▄▄▄▄▄▄▄▁▁▁▁▁▁▁▁▁     2.5   0.007    99 %

hessinit's start is ahead: PyTorch's ends at 200 times its loss. After 300 steps
at lr = 0.3 the loss is 0.007 from hessinit's start and 1.4 from PyTorch's; of
360 held-out digits 99 % and 42 % are read right."""
    )


def test_the_seeds_in_a_terminal_and_in_a_narrow_one() -> None:
    assert render(seeds_renderables(AHEAD, 80), 80).splitlines()[:6] == [
        " start               median loss   lowest … highest   right",
        "────────────────────────────────────────────────────────────",
        " PyTorch's default           1.4          1.4 … 1.5    41 %",
        " He                          0.1          0.1 … 0.1    91 %",
        " LSUV                      0.012       0.004 … 0.02    99 %",
        " hessinit                  0.007      0.007 … 0.007    99 %",
    ]
    assert max(map(len, render(seeds_renderables(AHEAD, 45), 45).splitlines())) <= 45


def test_the_page_has_the_verdict_both_curves_in_their_colours_and_the_table_of_seeds() -> None:
    page = demonstration_page(example_initialization(), PAIR, AHEAD)
    assert page.verdict == [conclude_pair(AHEAD), conclude_seeds(AHEAD)]
    assert page.tone == "good"
    assert [number.text for number in page.numbers] == ["0.3", "42 %", "99 %"]
    blocks = [block for section in page.sections for block in section.blocks]
    charts = [block for block in blocks if isinstance(block, LineChart)]
    assert [chart.y_label for chart in charts] == ["training loss", "lr·‖H‖"]
    for chart in charts:
        assert [(line.name, line.color) for line in chart.series] == [
            ("PyTorch's default", "vermilion"),
            ("hessinit", "blue"),
        ]
    assert charts[0].series[0].y == pytest.approx([2.3, 1.85, 1.4])
    assert charts[1].series[1].y == pytest.approx([3.9, 1.2])
    assert any(isinstance(block, RateLine) for block in blocks)
    seeds = [block for block in blocks if isinstance(block, Table)][-1]
    assert [column.heading for column in seeds.columns] == [
        "start", "median loss", "read right, median", "seed 0", "seed 1",
    ]  # fmt: skip
    assert seeds.columns[1].marks == ["", "", "", "best"]
    html = render_page(page)
    assert html.startswith("<!DOCTYPE html>")
    assert "Is it luck?" in html


@pytest.mark.parametrize(
    ("ours", "tone"), [([0.007, 0.007], "good"), ([0.5, 0.5], "fair"), ([9.0, 0.001], "bad")]
)
def test_the_page_is_coloured_by_how_hessinit_fares(ours: list[float], tone: str) -> None:
    story = make_story(default=[1.0, 1.0], lsuv=[0.1, 0.1], hessinit=ours)
    assert demonstration_page(example_initialization(), PAIR, story).tone == tone


def test_the_picture_has_both_curves_and_the_edge_of_stability() -> None:
    losses, sharpness = draw_demonstration(PAIR, 0.3).axes
    assert [line.get_label() for line in losses.get_lines()] == ["PyTorch's default", "hessinit"]
    assert losses.get_lines()[1].get_ydata() == pytest.approx([2.5, 0.1, 0.007])
    assert list(sharpness.get_lines()[2].get_ydata()) == [2.0, 2.0]
    assert demonstration_png(PAIR, 0.3).startswith(b"\x89PNG")
    broken = [(PAIR[0][0], make_tracking([2.0, 3.0, math.inf], "default")), PAIR[1]]
    assert len(draw_demonstration(broken, 0.3).axes[0].get_lines()) == 3  # and a cross where one broke off


def test_a_story_survives_json_whatever_its_losses() -> None:
    plain = make_story(default=[math.nan], hessinit=[0.1]).to_dict()
    assert plain["tries"][0]["final_loss"] == "nan"
    assert plain["held_out"] == 360


def test_another_seed_is_another_network_and_the_same_seed_the_same_one() -> None:
    weights = [problem(seed)[0].get_parameter("fc2.weight") for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_problem_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    problem(seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_smallest_norm_is_right_though_it_is_measured_in_fp32() -> None:
    """fc2 has 1e-4 beside a loss of 2: its dense Gauss-Newton matrix in fp64 is the truth."""
    model, loss, (images, labels) = problem(seed=0)
    few = images[:32], labels[:32]
    report = measure(model, loss, few)
    model = model.double()
    fixed = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def outputs(weight: torch.Tensor) -> torch.Tensor:
        return functional_call(model, {**fixed, "fc2.weight": weight}, few[0].double())

    jacobian = jacrev(outputs, chunk_size=80)(fixed["fc2.weight"]).reshape(32, 10, -1)
    shares = outputs(fixed["fc2.weight"]).softmax(dim=1)
    roots = torch.diag_embed(shares.sqrt()) - shares.unsqueeze(2) * shares.sqrt().unsqueeze(1)
    factor = torch.einsum("nki,nkp->nip", roots, jacobian).reshape(320, -1)
    truth = torch.linalg.matrix_norm(factor, 2).item() ** 2 / 32
    assert report["fc2"].norm == pytest.approx(truth, rel=1e-3)
    assert report["fc2"].verdict == "vanishing"


def test_training_is_what_a_plain_loop_does_on_held_out_digits() -> None:
    images, labels = load_digits()
    model, made = prepare("hessinit", LEARNING_RATE, seed=1)
    assert made is not None
    assert made.after is not None
    assert LEARNING_RATE * made.after.network.norm == pytest.approx(4.0, rel=0.06)
    tracking, tried = train(model, "hessinit", LEARNING_RATE, seed=1)
    with torch.no_grad():
        right = (model(images[TRAINED_ON:]).argmax(1) == labels[TRAINED_ON:]).sum().item()
    assert tried.accuracy == pytest.approx(right / 360)
    last = [loss for _, loss in tracking.losses[-30:]]
    assert len(tracking.losses) == STEPS
    assert tried.final_loss == pytest.approx(statistics.fmean(last))
    again, _ = prepare("hessinit", LEARNING_RATE, seed=1)
    assert train(again, "hessinit", LEARNING_RATE, seed=1)[1] == tried


def test_every_start_begins_where_its_name_says() -> None:
    default = prepare("default", 0.3, 4)[0]
    assert torch.equal(default.get_parameter("fc3.weight"), build_network(4).get_parameter("fc3.weight"))
    with torch.no_grad():
        for start in STARTS:
            if start != "default":
                model, made = prepare(start, 0.3, 4)
                assert (made is not None) == (start == "hessinit")
                assert not torch.equal(model.get_parameter("fc3.weight"), default.get_parameter("fc3.weight"))
        units = torch.nn.Sequential(*list(prepare("lsuv", 0.3, 4)[0].children())[:6])(load_digits()[0][:256])
    assert units.var().item() == pytest.approx(1.0, rel=0.05)


def test_the_rate_is_the_one_at_which_pytorch_s_own_start_trains_best() -> None:
    means = {}
    for lr in (0.01, 0.03, 0.1, 0.3, 1.0):
        tried = [train(build_network(seed), "default", lr, seed)[1] for seed in range(2)]
        means[lr] = statistics.fmean(one.final_loss for one in tried)
    assert min(means, key=means.__getitem__) == LEARNING_RATE
    assert means[LEARNING_RATE] < 0.8 * GUESSING
