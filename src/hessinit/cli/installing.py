"""`hessinit --install-completion`, which typer does: what if a file of the shell cannot be written."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from hessinit.cli.failures import WRONG_USE
from hessinit.cli.shell_scripts import use_our_scripts

WRITTEN_AGAIN = ("~/.bashrc", "~/.zshrc")  # as a whole, so that a full disk would leave them empty


@contextmanager
def installed_with_care() -> Iterator[None]:
    """Our scripts are installed, or a line says why not, and what the shell reads is as it was."""
    use_our_scripts()
    if sys.argv[1:] != ["--install-completion"]:
        yield
        return
    files = [Path(os.path.expanduser(name)) for name in WRITTEN_AGAIN]
    kept = {path: path.read_bytes() for path in files if path.is_file() and os.access(path, os.R_OK)}
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, UnicodeError) as failure:
        for path, content in kept.items():
            if path.read_bytes() != content:
                path.write_bytes(content)
        typer.echo(f"Error: completion cannot be installed: {failure}.", err=True)
        typer.echo("Its script, to put where your shell looks: hessinit --show-completion", err=True)
        raise SystemExit(WRONG_USE) from None
