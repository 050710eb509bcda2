from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hessinit.cli.show import show
from hessinit.present.reproduction_example import example_reproduction
from typer.testing import CliRunner

from hessinit.results.reproduction import Cell, Reproduction


def make_awkward() -> Reproduction:
    """Numbers that JSON has no word for, or that need every digit."""
    example = example_reproduction()
    table = replace(
        example.findings.tables[0],
        cells=(
            Cell(row="1.000", column="Hessian 1", ours=math.inf, error=math.nan, n=1, paper=0.1 + 0.2),
            Cell(row="0.500", column="Hessian 1", ours=-math.inf, error=5e-324, n=2, paper=None),
            Cell(row="0.100", column="Hessian 1", ours=-0.0, n=3, paper=24.48, rule="within 1", within=False),
        ),
    )
    return replace(
        example,
        findings=replace(example.findings, tables=(table,)),
        results={"a": {"loss": [0.1, "inf", None], "name": "ä"}},
        seconds=1 / 3,
    )


@pytest.mark.parametrize("made_up", [example_reproduction(), make_awkward()])
def test_a_record_keeps_every_bit(tmp_path, made_up):
    path = tmp_path / "record.json"
    made_up.save(path)
    again = Reproduction.load(path)
    assert repr(again) == repr(made_up)  # and not ==: nan is not nan, and -0.0 is 0.0
    assert again.results == made_up.results
    assert again.to_json() == made_up.to_json() == path.read_text(encoding="utf-8")
    assert (again.within, len(again.judged)) == (made_up.within, len(made_up.judged))


def invoke_show(*arguments: object) -> object:
    import typer

    app = typer.Typer()
    app.command()(show)
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "100"})


def test_show_prints_a_record_as_print_does_and_writes_the_page(tmp_path):
    path, page = tmp_path / "record.json", tmp_path / "page.html"
    example_reproduction().save(path)
    result = invoke_show(path, "--html", page)
    assert result.exit_code == 0
    assert result.stdout == f"{example_reproduction()}\n"
    assert result.stderr == f"Wrote {page}.\n"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
