"""The folders that a user names."""

from __future__ import annotations

import os
from pathlib import Path

from hessinit.errors import ProblemError


def at_home(argument: str, folder: str | os.PathLike[str]) -> Path:
    """The path with ~ spelled out, which a shell leaves as it is in --folder=~/x.

    >>> at_home("folder", "here").name
    'here'
    """
    try:
        return Path(folder).expanduser()
    except RuntimeError as failure:  # no such user, or nobody's process
        raise ProblemError(
            f"{argument}={str(folder)!r} begins with a ~ that stands for no home here; write the path "
            "out, or begin it with ./ if the folder is called so."
        ) from failure
