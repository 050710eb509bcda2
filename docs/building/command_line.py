"""Write the help of every command into docs/command-line.md: python docs/building/command_line.py

The tests compare the page with the real `--help`, so run this when an option changes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "command-line.md"
HELP = re.compile(r"(?<=^```console\n)\$ (?P<command>hessinit(?: \w+)? --help)\n.*?(?=^```$)", re.M | re.S)


def refreshed(text: str) -> str:
    """`text` with the present help below each `$ hessinit … --help`."""
    return HELP.sub(lambda found: f"$ {found['command']}\n{help_of(found['command'])}\n", text)


def help_of(command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        check=True,
        encoding="utf-8",
    )
    return done.stdout.strip("\n")


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
