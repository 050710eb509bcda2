"""The command line. Nothing heavy is imported before it is needed: --help must not wait for torch."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line: what the `hessinit` script calls."""
    from hessinit.cli.app import run

    run()
