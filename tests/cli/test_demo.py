from __future__ import annotations

import json
import re

import pytest

from hessinit import Comparison, Initialization, Tracking, measure
from hessinit.cli import demo

from .conftest import without_seconds


@pytest.fixture
def _shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps, few seeds: what is printed and written is of the same kind."""
    monkeypatch.setattr(demo, "STEPS", 20)
    monkeypatch.setattr(demo, "SEEDS", 2)


def test_the_demo_shows_that_the_initialization_decides(run, folder, monkeypatch):
    monkeypatch.setattr(demo, "SEEDS", 1)
    monkeypatch.setattr(demo, "STEPS", 150)
    result = run("demo", columns=80)
    assert result.exit_code == 0, result.output
    assert result.stderr == "Wrote demo-output/demo.html.\nWrote demo-output/curves.png.\n"
    headings = re.findall(r"^\d\. ([^.:]+)", result.stdout, flags=re.MULTILINE)
    assert [heading.split()[0] for heading in headings] == ["Ten", "New", "Training", "Five"]
    assert max(map(len, re.sub("file:.*|Next: .*", "", result.stdout).splitlines())) <= 80
    final = re.findall(r"^ (default|hessinit) +([\d.]+)", result.stdout, flags=re.MULTILINE)
    losses = {name: float(loss) for name, loss in final}
    assert losses["hessinit"] < 0.5 < losses["default"] < 2.4  # guessing has ln 10 = 2.3
    page = (folder / "demo-output" / "demo.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert "Two initializations of one network" in page
    assert (folder / "demo-output" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((folder / "demo-output").iterdir())) == 2


@pytest.mark.usefixtures("_shortened")
def test_json_holds_what_the_library_computes_and_is_all_that_is_printed(run):
    result = run("demo", "--json", "--seed", 3, "--lr", 0.1, "--folder", "d")
    assert (result.exit_code, result.stderr) == (0, "Wrote d/demo.html.\nWrote d/curves.png.\n"), (
        result.output
    )
    shown = json.loads(result.stdout)
    assert shown["kind"] == "hessinit demonstration"
    initialization = Initialization.from_dict(shown["initialization"])
    assert initialization.lr == 0.1
    measured = measure(*demo.problem(seed=3), seed=3)
    assert initialization.before.network.norm == pytest.approx(measured.network.norm, rel=1e-3)
    for _, tracking in shown["runs"]:
        assert len(Tracking.from_dict(tracking).losses) == 20
    comparison = Comparison.from_dict(shown["comparison"])
    assert (comparison.seeds, comparison.learning_rates) == ((3, 4), (0.1,))


def test_the_demo_s_problem_can_be_measured_by_name(run):
    result = run("measure", "hessinit.cli.demo:problem", "--json")
    assert result.exit_code == 0, result.output
    measured = measure(*demo.problem(), seed=0).to_dict()
    assert without_seconds(json.loads(result.stdout)) == without_seconds(measured)
