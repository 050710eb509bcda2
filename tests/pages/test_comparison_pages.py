"""The pages of compare, sweep and reproduce in a real browser, offline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsing import DESKTOP, PHONE, chromium, column, contrasts, hover_over, opened, overflow, sort_by

from hessinit.present.comparison_example import example_comparison, example_sweep
from hessinit.present.comparison_html import render_comparison_page
from hessinit.present.reproduction_example import example_reproduction
from hessinit.present.reproduction_html import render_reproductions_page
from hessinit.results.comparison import Comparison
from hessinit.results.reproduction import Reproduction

ATTACK = "<script>alert(1)</script>"
IMAGE = '"><img src=x onerror=alert(2)>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def several() -> list[Reproduction]:
    return [example_reproduction(), replace(example_reproduction("table-4-mnist-other"), reading="other")]


def hostile_comparison() -> Comparison:
    """Starts and layers by names that would be markup."""
    made = example_comparison()
    names = dict(zip(made.schemes[:2], (ATTACK, IMAGE), strict=True))
    runs = [
        replace(
            run,
            scheme=names.get(run.scheme, run.scheme),
            norms=None
            if run.norms is None
            else {ATTACK if key == "fc1" else key: run.norms[key] for key in run.norms},
            note=ATTACK,
        )
        for run in made.runs
    ]
    starts = tuple(names.get(start, start) for start in made.schemes)
    return replace(made, schemes=starts, runs=tuple(runs), notes=(IMAGE,), versions={ATTACK: IMAGE})


def hostile_reproduction() -> Reproduction:
    made = example_reproduction()
    figures = tuple(
        replace(figure, title=ATTACK, curves=tuple(replace(curve, name=ATTACK) for curve in figure.curves))
        for figure in made.findings.figures
    )
    return replace(made, title=ATTACK, data=IMAGE, findings=replace(made.findings, figures=figures))


def deep_comparison() -> Comparison:
    """Sixty layers."""
    made = example_comparison()
    layers = {f"encoder.layers.{number}.linear": 1.0 + number for number in range(60)}
    norms = {**layers, "network": 99.0}
    return replace(made, runs=tuple(replace(run, norms=run.norms and norms) for run in made.runs))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    texts = {
        "compare": render_comparison_page(example_comparison()),
        "sweep": render_comparison_page(example_sweep()),
        "one": render_reproductions_page([example_reproduction()]),
        "two": render_reproductions_page(several(), ["broken.json"]),
        "hostile comparison": render_comparison_page(hostile_comparison()),
        "hostile record": render_reproductions_page(
            [hostile_reproduction(), example_reproduction()], [ATTACK]
        ),
        "deep": render_comparison_page(deep_comparison()),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("name", ["compare", "sweep", "two", "hostile comparison", "deep"])
def test_a_page_opens_offline_draws_every_chart_and_fits(browser, pages, name, width):
    with opened(browser, pages[name], width=width) as page:
        assert overflow(page) <= 0
        drawn = page.locator("figure .picture svg")
        assert drawn.count() == page.locator("figure").count() >= 2
        for place in range(drawn.count()):
            assert drawn.nth(place).bounding_box()["width"] > 200


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["compare", "two"])
def test_every_text_has_a_contrast_of_four_and_a_half(browser, pages, name, dark):
    with opened(browser, pages[name], dark=dark) as page:
        found = contrasts(page)
        assert len(found) > 30
        assert [text for ratio, text in found if ratio < 4.5] == []


def test_the_table_sorts_by_loss_with_what_diverged_at_the_end(browser, pages):
    came = ["hessinit", "lsuv", "default", "he", "fixup"]
    with opened(browser, pages["compare"]) as page:
        assert column(page, 0) == came
        assert sort_by(page, "lr 0.3") == "descending"
        assert column(page, 0) == ["default", "hessinit", "lsuv", "he", "fixup"]
        assert sort_by(page, "lr 0.3") == "ascending"
        assert column(page, 0) == ["hessinit", "default", "lsuv", "he", "fixup"]
        assert sort_by(page, "lr 0.3") is None
        assert column(page, 0) == came
        assert "0.00800 ± 0.00231*" in page.locator("td.best").all_inner_texts()
        assert page.locator("td.diverged").all_inner_texts() == ["diverged 1/3", "diverged 3/3"]


def test_the_numbers_of_a_record_sort_as_numbers_in_their_groups(browser, pages):
    with opened(browser, pages["one"]) as page:
        came = ["1.000", "0.500", "0.100", "0.050", "0.005", "hessinit"]
        assert column(page, 0) == came
        page.locator("main .table table").first.get_by_role("button", name="ours").nth(2).click()  # the loss
        losses = [float(text.split(" ±")[0]) for text in column(page, 8)]
        assert losses == sorted(losses, reverse=True)
        assert column(page, 0)[-1] == "hessinit"  # 0.291, the lowest


def test_hovering_a_cell_of_the_map_says_its_loss_its_error_and_its_curvature(browser, pages):
    made = example_comparison()
    losses = [run.final_loss for run in made.runs_of("hessinit", 0.03)]
    error = statistics.stdev(losses) / math.sqrt(3)
    caption = "Final loss; framed: the lowest at that rate; ✗: diverged"
    with opened(browser, pages["compare"]) as page:
        texts = page.locator("figure").first.locator("svg .cells text").all_text_contents()
        said = hover_over(page, caption, ".cells text", texts.index("0.356"))
        assert said.splitlines() == [
            "hessinit, learning rate 0.03",
            f"final loss {statistics.fmean(losses):.4g}",
            f"± {error:.2g} over 3 seeds; lr·‖H‖ = 1.8 at the start",
        ]
        crossed = hover_over(page, caption, ".cells text", texts.index("✗ 1/3"))
        assert crossed.splitlines()[-1] == "1 of 3 seeds diverged; lr·‖H‖ = 4.2 at the start"


def test_the_arrow_keys_read_a_curve_and_where_seeds_diverged(browser, pages):
    with opened(browser, pages["compare"]) as page:
        figure = page.locator("figure", has=page.get_by_text("lr 0.3", exact=True))
        readout = figure.locator(".readout")
        figure.locator(".drawing").focus()
        page.keyboard.press("ArrowRight")
        first = readout.inner_text()
        assert first.startswith("step 2 · hessinit: 1.78")
        page.keyboard.press("ArrowRight")
        assert readout.inner_text() != first
        for _ in range(8):
            page.keyboard.press("ArrowDown")
        last = readout.inner_text()  # the last series is the cross of he
        assert " · he: " in last
        assert last.endswith("3 of 3 seeds diverge")


def test_the_overview_leads_to_each_experiment_and_names_what_is_left_out(browser, pages):
    with opened(browser, pages["two"], reduced_motion="reduce") as page:  # it scrolls at once
        assert "broken.json is left out" in page.locator(".verdict").inner_text()
        page.locator("main .table").first.get_by_role("link").nth(1).click()
        assert page.evaluate("location.hash") == "#table-4-mnist-other"
        heading = page.locator("#table-4-mnist-other h2").bounding_box()
        assert 0 <= heading["y"] < 200


@pytest.mark.parametrize("name", ["hostile comparison", "hostile record"])
def test_names_that_look_like_markup_are_shown_and_never_run(browser, pages, name):
    with opened(browser, pages[name]) as page:
        for figure in page.locator("figure").all():
            figure.locator(".drawing").focus()
            page.keyboard.press("ArrowRight")
            assert figure.locator(".readout").inner_text()
        page.locator("main .table").first.get_by_role("button").first.click()
        assert page.locator("main").inner_text().count(ATTACK) > 2
        assert page.locator("main img").count() == 0
