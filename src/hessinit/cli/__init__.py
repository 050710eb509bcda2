"""The command line. Nothing heavy is imported before it is needed: --help must not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hessinit.cli.commands import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line: what the `hessinit` script calls."""
    from hessinit.cli.interrupts import leave_when_interrupted

    leave_when_interrupted()  # before all other imports: they are the first thing that Ctrl-C meets
    from hessinit.cli.commands import run

    run()


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hessinit.cli.commands import app

    return app
