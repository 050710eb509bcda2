"""`python -m hessinit` is the command line."""

from __future__ import annotations

from hessinit.cli.app import main

if __name__ == "__main__":
    main()
