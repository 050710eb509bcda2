"""The command line. It imports torch only when a command needs it: --help must not wait."""

from __future__ import annotations

from hessinit.cli.app import app, main

__all__ = ["app", "main"]
