"""`hessinit show`: a saved result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hessinit.cli.failures import WRONG_USE, stop
from hessinit.cli.options import AsHtml, AsJson, Picture
from hessinit.cli.output import Output, write_file
from hessinit.cli.printing import print_records, try_printing
from hessinit.problem_file import did_you_mean_file

if TYPE_CHECKING:
    from hessinit.results.reproduction import Reproduction

WAY_OUT = "Give a file that --save, --json or --log of a command, or save() in Python, wrote."


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
    output.check(reads=path)
    loaded = _load(path)
    if isinstance(loaded, list):
        _show_all(loaded, output)
    else:
        output.give(loaded)


def _load(path: Path) -> Any:
    from hessinit.results.result import load

    try:
        return load(path)
    except FileNotFoundError:
        found = [*path.parent.glob("*.json"), *path.parent.glob("*.jsonl")] if path.parent.is_dir() else []
        stop(f"{path} does not exist.{did_you_mean_file(path, sorted(found))}")
    except OSError as failure:
        stop(f"{path} cannot be read: {failure.strerror}.")
    except RecursionError:
        stop(f"{path} cannot be read: its JSON is nested too deeply. {WAY_OUT}")
    except ValueError as refusal:
        stop(str(refusal).replace("Give a file that report.save() wrote.", WAY_OUT))


def _show_all(records: list[Reproduction], output: Output) -> None:
    """What `hessinit reproduce --json` printed."""
    if output.picture is not None:
        stop(f"--picture {output.picture} draws one record, and there are {len(records)}; show one of them.")
    done = try_printing(lambda: print_records(records, output.json))
    if output.html is not None:
        from hessinit.present.reproduction_html import render_reproductions_page
        from hessinit.results.result import write_text

        done &= write_file(output.html, lambda page: write_text(page, render_reproductions_page(records)))
    if not done:
        raise typer.Exit(WRONG_USE)
