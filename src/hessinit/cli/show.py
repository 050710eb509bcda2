"""`hessinit show`: a saved report, comparison or reproduction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hessinit.cli.failures import stop
from hessinit.cli.options import AsHtml
from hessinit.cli.output import Output
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
    output.give(_load_report(path))


def _load_report(path: Path) -> CurvatureReport | Comparison | Reproduction:
    from hessinit.report import CurvatureReport, comparison, reproduction

    try:
        text = path.read_bytes()
        kind = _kind(text)
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
    return data.get("kind") if isinstance(data, dict) else None
