"""`hessinit show`: a saved result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hessinit.cli.failures import stop
from hessinit.cli.options import AsHtml, AsJson, Picture
from hessinit.cli.output import Output, print_reports
from hessinit.errors import did_you_mean

if TYPE_CHECKING:
    from hessinit.report.reproduction import Reproduction


def show(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="What --save, --json, --log or save() wrote.", show_default=False
        ),
    ],
    as_json: AsJson = False,
    html: AsHtml = None,
    picture: Picture = None,
) -> None:
    """Print what another command saved. It needs no torch, and no model.

    \b
    Examples:
      hessinit show report.json
      hessinit show report.json --html report.html
      hessinit show comparison.json --picture comparison.pdf
      hessinit show curvature.jsonl --json > curvature.json
      hessinit show table-4-mnist.json --html table-4.html

    Exit status: 0 done, 2 wrong usage.
    """
    output = Output(as_json, html, picture=picture)
    output.check()
    loaded = _load(path)
    if isinstance(loaded, list):
        _show_all(loaded, output)
    else:
        output.give(loaded)


def _load(path: Path) -> Any:
    from hessinit.report.store import load

    try:
        return load(path)
    except FileNotFoundError:
        found = [*path.parent.glob("*.json"), *path.parent.glob("*.jsonl")] if path.parent.is_dir() else []
        stop(f"{path} does not exist.{did_you_mean(path.name, sorted(each.name for each in found))}")
    except (OSError, ValueError, RecursionError) as failure:
        stop(f"{path} cannot be read: {failure.strerror}." if isinstance(failure, OSError) else str(failure))


def _show_all(records: list[Reproduction], output: Output) -> None:
    """What `hessinit reproduce --json` printed."""
    if output.picture is not None:
        stop(f"--picture {output.picture} draws one record, and there are {len(records)}; show one of them.")
    if output.json:
        sys.stdout.write(json.dumps([each.to_dict() for each in records], allow_nan=False) + "\n")
    else:
        print_reports(records)
    sys.stdout.flush()
    if output.html is not None:
        from hessinit.present.reproduction_html import render_reproductions_page
        from hessinit.report.atomic import write_text

        write_text(output.html, render_reproductions_page(records))
        typer.echo(f"Wrote {output.html}.", err=True)
