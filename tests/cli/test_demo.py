from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import pytest

import hessinit
from calls import measure
from hessinit import Comparison, Initialization
from hessinit.cli import demo

from .conftest import without_seconds


@pytest.fixture
def _shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps, rates and seeds, in this process: what is printed and written is of the same kind."""
    monkeypatch.setattr(hessinit, "RunSettings", partial(hessinit.RunSettings, workers=1))
    monkeypatch.setattr(demo, "DEMO", replace(demo.DEMO, steps=20, rates=(0.03, 0.1), seeds=1))


def test_the_demo_compares_four_starts_over_the_learning_rates(run, folder, monkeypatch):
    monkeypatch.setattr(demo, "DEMO", replace(demo.DEMO, rates=(0.003, 0.1), seeds=1))
    result = run("demo", columns=80)
    assert result.exit_code == 0, result.output
    assert result.stderr == "Wrote demo-output/demo.html.\nWrote demo-output/curves.png.\n"
    headings = re.findall(r"^\d\. (\w+)", result.stdout, flags=re.MULTILINE)
    assert headings == ["Ten", "New", "Four"]
    assert max(map(len, re.sub("file:.*|Next: .*", "", result.stdout).splitlines())) <= 80
    found = re.findall(r"^ (PyTorch|He|LSUV|hessinit) .* ([\d.]+)$", result.stdout, flags=re.MULTILINE)
    plain, normalized = ({name: float(excess) for name, excess in four} for four in (found[:4], found[4:]))
    assert plain["hessinit"] < 0.2 < 1.5 < plain["PyTorch"]
    assert normalized["hessinit"] < 0.05 < 0.2 < normalized["LSUV"]
    assert len(re.findall("(Plain|Normalized) network: (?:hessinit is behind|no other)", result.stdout)) == 2
    page = (folder / "demo-output" / "demo.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert "Final loss against learning rate" in page
    assert (folder / "demo-output" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((folder / "demo-output").iterdir())) == 2


@pytest.mark.usefixtures("_shortened")
def test_json_holds_what_the_library_computes_and_is_all_that_is_printed(run):
    result = run("demo", "--json", "--seed", 3, "--lr", 0.1, "--folder", "d")
    assert result.exit_code == 0, result.output
    assert result.stderr == "Wrote d/demo.html.\nWrote d/curves.png.\n"
    shown = json.loads(result.stdout)
    assert shown["kind"] == "hessinit demonstration"
    initialization = Initialization.from_dict(shown["initialization"])
    assert initialization.lr == 0.1
    measured = measure(*demo.problem(seed=3), seed=3)
    assert initialization.before.network.norm == pytest.approx(measured.network.norm, rel=1e-3)
    grids = [Comparison.from_dict(shown[name]) for name in ("plain", "normalized")]
    for grid in grids:
        assert (grid.seeds, grid.learning_rates, grid.schemes) == ((3,), (0.03, 0.1), tuple(demo.STARTS))
    counts = [grid.settings["parameters"] for grid in grids]
    assert counts[1] - counts[0] == 9 * 2 * demo.DEMO.width  # gains and biases of nine LayerNorms


def test_the_demo_s_problem_can_be_measured_by_name(run):
    result = run("measure", "hessinit.cli.demo:problem", "--json")
    assert result.exit_code == 0, result.output
    measured = measure(*demo.problem(), seed=0).to_dict()
    assert without_seconds(json.loads(result.stdout)) == without_seconds(measured)
