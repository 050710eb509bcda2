"""`hessinit show`: a saved report, comparison or reproduction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hessinit.cli.failures import stop
from hessinit.cli.options import AsHtml
from hessinit.cli.output import Output, print_reports
from hessinit.errors import did_you_mean

if TYPE_CHECKING:
    from hessinit.report import CurvatureReport
    from hessinit.report.comparison import Comparison
    from hessinit.report.reproduction import Reproduction


def show(
    path: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="What --save, --json or save() wrote.", show_default=False),
    ],
    html: AsHtml = None,
) -> None:
    """Print a saved report, comparison or reproduction. It needs no torch, and no model.

    \b
    Examples:
      hessinit show report.json
      hessinit show report.json --html report.html
      hessinit show comparison.json
      hessinit show table-4-mnist.json --html table-4.html
    """
    output = Output(html=html)
    output.check()
    loaded = _load_report(path)
    if isinstance(loaded, list):
        _show_all(loaded, html)
    else:
        output.give(loaded)


def _load_report(path: Path) -> CurvatureReport | Comparison | Reproduction | list[Reproduction]:
    from hessinit.report import CurvatureReport, comparison, reproduction

    try:
        text = path.read_bytes()
        kind = _kind(text)
        if kind is list:  # what `hessinit reproduce --json` prints
            return [reproduction.read_reproduction(each, str(path)) for each in json.loads(text)]
        if kind == comparison.KIND:
            return comparison.Comparison.from_json(text, source=str(path))
        if kind == reproduction.KIND:
            return reproduction.Reproduction.from_json(text, source=str(path))
        return CurvatureReport.from_json(text, source=str(path))
    except FileNotFoundError:
        names = [each.name for each in path.parent.glob("*.json")] if path.parent.is_dir() else []
        stop(f"{path} does not exist.{did_you_mean(path.name, sorted(names))}")
    except (OSError, ValueError) as failure:
        stop(f"{path} cannot be read: {failure.strerror}." if isinstance(failure, OSError) else str(failure))


def _kind(text: bytes) -> object:
    """What the file says it is; None where it says nothing, which is for the reader of reports to refuse."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    if isinstance(data, list) and data and all(isinstance(each, dict) and "kind" in each for each in data):
        return list
    return data.get("kind") if isinstance(data, dict) else None


def _show_all(records: list[Reproduction], html: Path | None) -> None:
    from hessinit.present.reproduction_html import render_reproductions_page
    from hessinit.report.atomic import write_text

    print_reports(records)
    if html is not None:
        write_text(html, render_reproductions_page(records))
        typer.echo(f"Wrote {html}.", err=True)
