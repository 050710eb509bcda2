"""`hessinit show`: a saved report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hessinit.cli.failures import stop
from hessinit.cli.options import AsHtml
from hessinit.cli.output import Output
from hessinit.errors import did_you_mean

if TYPE_CHECKING:
    from hessinit.report import CurvatureReport


def show(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="What --save, --json or report.save() wrote.", show_default=False
        ),
    ],
    html: AsHtml = None,
) -> None:
    """Print a saved report. It needs no torch, and no model.

    \b
    Examples:
      hessinit show report.json
      hessinit show report.json --html report.html
    """
    output = Output(html=html)
    output.check()
    output.give(_load_report(path))


def _load_report(path: Path) -> CurvatureReport:
    from hessinit.report import load

    try:
        return load(path)
    except FileNotFoundError:
        names = [each.name for each in path.parent.glob("*.json")] if path.parent.is_dir() else []
        stop(f"{path} does not exist.{did_you_mean(path.name, sorted(names))}")
    except (OSError, ValueError) as failure:
        stop(f"{path} cannot be read: {failure.strerror}." if isinstance(failure, OSError) else str(failure))
