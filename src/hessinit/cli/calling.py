"""How to call the command line again, for the commands that it advises."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def called_as() -> str:
    """`hessinit` where the shell finds that, else the script that runs, as in `.venv/bin/hessinit`."""
    script = Path(sys.argv[0])
    if script.stem != "hessinit" or not script.is_file() or shutil.which("hessinit"):
        return "hessinit"
    inside = script.absolute().is_relative_to(Path.cwd())
    return shlex.quote(os.path.relpath(script) if inside else str(script.absolute()))
