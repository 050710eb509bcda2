"""`hessinit reproduce`: the paper's tables and figures, beside the printed numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hessinit.cli.comparing import stdout_for_the_result
from hessinit.cli.completing import complete_data, complete_experiment
from hessinit.cli.failures import WRONG_USE, failures_explained
from hessinit.cli.interrupts import INTERRUPTED, raise_when_interrupted
from hessinit.cli.options import Workers, read_folder
from hessinit.cli.printing import print_records, try_printing
from hessinit.cli.wording import in_words_of, translate
from hessinit.paper import NAMES

if TYPE_CHECKING:
    from hessinit.results.reproduction import Reproduction

# The library's arguments, as they are called here.
OPTIONS = {
    "name": "NAME",
    "data": "--data",
    "data_dir": "--data-dir",
    "seeds": "--seeds",
    "variant": "--variant",
    "folder": "--folder",
    "workers": "--workers",
}


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help=f"Some of {', '.join(NAMES)}.",
            show_default=False,
            autocompletion=complete_experiment,
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_data,
            help="paper: the sets the paper used, and Fashion-MNIST; digits: what is embedded, without any "
            "download; or one of mnist, fashion-mnist, cifar-10, wikipedia.",
        ),
    ] = "paper",
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the files are, as they are published. Without it images are downloaded once, into "
            "your cache; a Wikipedia text (.txt, also .xz, .bz2, .gz) must be given.",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="How many restarts.  [default: 10 for table 1, 400 for 2 and 3, 5 trainings for 4 and 5, 3 "
            "for word2vec]",
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Another way to fill in what the paper leaves unsaid."),
    ] = None,
    folder: Annotated[
        Path, typer.Option(parser=read_folder, metavar="DIR", help="Keep everything here, and go on from it.")
    ] = Path("reproduction"),
    workers: Workers = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the records as a JSON list, and nothing else.")
    ] = False,
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
    where it was, to the same numbers; so it does after a request to end, as kill sends.

    Exit status: 0 done, 2 wrong usage, 130 interrupted.
    """
    try:
        with failures_explained(" ".join(names), "reproducing"), in_words_of(OPTIONS):
            from hessinit.paper import reproduce as verb

            raise_when_interrupted()
            with stdout_for_the_result():
                found = verb(
                    *names, data=data, data_dir=data_dir, seeds=seeds, variant=variant, folder=folder,
                    workers=workers,
                )  # fmt: skip
    except KeyboardInterrupt as interruption:
        reason = translate(str(interruption), OPTIONS) or "stopped before the first piece was done."
        typer.echo(f"Interrupted: {reason}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    printed = try_printing(lambda: print_records(found, as_json))
    typer.echo(_say_what_was_written(folder, found), err=True)
    if not printed:
        raise typer.Exit(WRONG_USE)


def _say_what_was_written(folder: Path, found: tuple[Reproduction, ...]) -> str:
    from hessinit.paper import PAGE

    records = f"{len(found)} record{'' if len(found) == 1 else 's'}"
    pictures = sum(len(each.findings.figures) for each in found)
    drawn = f", {pictures} picture{'' if pictures == 1 else 's'}" if pictures else ""
    return f"Wrote {records}{drawn} and the page {folder / PAGE}."
