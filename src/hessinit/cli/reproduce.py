"""`hessinit reproduce`: the paper's tables and figures, beside the printed numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hessinit.cli import options
from hessinit.cli.failures import failures_explained, import_torch
from hessinit.cli.output import Output, stdout_for_results


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="table-1 to table-5, figure-1 or -2, word2vec, or all.",
            show_default=False,
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="paper: the sets the paper used, and Fashion-MNIST; digits: what is embedded, without any "
            "download; or one of mnist, fashion-mnist, cifar-10, wikipedia.",
        ),
    ] = "paper",
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the published files are. Without it images are downloaded once, into your cache; a "
            "Wikipedia text must be given.",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="How many restarts or trainings; the default depends on the table."
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Another choice of what the paper does not specify."),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Keep everything here, and go on from it."),
    ] = Path("reproduction"),
    workers: options.Workers = None,
    as_json: options.AsJson = False,
) -> None:
    """Make the paper's tables and figures again, beside its own.

    Prints every table: printed, ours, and whether the difference is within what is claimed. The folder gets a
    record for each (JSON, with all raw values), the figures, and a page with everything: reproduce.html.

    \b
    Examples:
      hessinit reproduce all --data digits
      hessinit reproduce table-4
      hessinit reproduce table-2 table-3 --data-dir data
      hessinit reproduce table-4 --variant one-hidden

    With digits nothing is downloaded, and all takes minutes. After an interruption the same command goes on
    where it was, to the same numbers.

    Exit status: 0 done, 2 wrong usage, 130 interrupted.
    """
    with (
        failures_explained(f"reproducing {' '.join(names)}", "the same command continues from what is kept."),
        stdout_for_results(),
    ):
        import_torch()
        from hessinit.paper import reproduce as verb

        found = verb(
            *names, data=data, data_dir=data_dir, seeds=seeds, variant=variant, folder=folder, workers=workers
        )
    Output(as_json).write(list(found) if as_json or len(found) > 1 else found[0])
    if data == "digits" and "all" in names:
        typer.echo("word2vec was left out: it needs a text, --data wikipedia --data-dir DIR.", err=True)
    records = f"{len(found)} record{'' if len(found) == 1 else 's'}"
    typer.echo(f"Wrote {records} and the page {folder / 'reproduce.html'}.", err=True)
