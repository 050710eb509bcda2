"""The result as data: printed, drawn, stored and read back."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from initialized_networks import LOSS, digits, lstm, mlp, text, text_loss
from matplotlib import pyplot

from hessinit.init.initialize import initialize_
from hessinit.present.initialization_example import example_initialization
from hessinit.results.initialization import Initialization


def test_the_table_is_this() -> None:
    shown = str(example_initialization()).splitlines()
    assert [line.rstrip() for line in shown[:10]] == [
        " layer      scale   ‖H‖ before   after",
        "───────────────────────────────────────",
        " fc1       × 1.21         0.31    12.4",
        " fc2       × 1.21         1.84      11",
        " fc3       × 1.21           64    12.8",
        "───────────────────────────────────────",
        " network                  64.5    20.2",
        "",
        "Met: ‖H‖ = 20.2 is within 5 % of the target.",
        "Target: the network's ‖H‖ = κ/lr = 2/0.1 = 20.",
    ]


def test_what_was_not_met_and_not_finite_is_said() -> None:
    result = replace(
        example_initialization(), before=None, converged=False, reason="too sharp", notes=("[red]",), lr=None
    )
    shown = str(result)
    assert "not finite" in shown
    assert "Not met: too sharp." in shown
    assert "Note: [red]" in shown
    assert "Target: the network's ‖H‖ = 20." in shown


@pytest.mark.parametrize("rule", ["network", "layers"])
def test_json_gives_an_equal_result_back(rule: str, tmp_path: Path) -> None:
    result = initialize_(mlp(3), LOSS, digits(), rule=rule)
    result.save(tmp_path / "r.json")
    read = Initialization.load(tmp_path / "r.json")
    assert read == result
    assert hash(read) == hash(result)
    assert read.plan is not None
    assert read.plan == result.plan
    assert read.measurements == result.measurements
    assert str(read).split("Start")[0] == str(result).split("Start")[0]
    assert not read.applied
    assert pickle.loads(pickle.dumps(result)) == result
    json.loads(result.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is not strict JSON"))


def test_numbers_that_are_not_finite_travel() -> None:
    first = replace(example_initialization().measurements[0], norm=math.inf, loss=math.nan)
    result = replace(example_initialization(), measurements=(first,))
    assert Initialization.from_json(result.to_json()) == result
    assert result != example_initialization()


def test_the_picture_shows_both_and_the_target() -> None:
    axes = example_initialization().plot()
    _, labels = axes.get_legend_handles_labels()
    assert labels == ["target 20", "before", "after"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["fc1", "fc2", "fc3", "network"]
    drawn = next(line for line in axes.get_lines() if line.get_label() == "after")
    assert list(drawn.get_ydata())[:3] == pytest.approx([12.4, 11.04, 12.8])
    pyplot.close("all")


def test_networks_measured_alone_are_shown_and_drawn() -> None:
    result = initialize_(lstm(), text_loss, text(), target=0.5)
    assert result.after is not None
    assert len(result.after) == 0
    assert "embed" in str(result)
    axes = result.plot()
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["network"]
    axes.figure.canvas.draw()
    pyplot.close("all")


def test_repr_and_html() -> None:
    result = example_initialization()
    assert repr(result) == "<Initialization by 'lsuv' to ‖H‖ = 20 (network): met, not applied>"
    assert "<table>" in result._repr_html_()
