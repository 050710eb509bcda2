"""scipy, which only the paper's experiments need: asked for when it is used, with the way to get it."""

from __future__ import annotations

import importlib
from types import ModuleType

from hessinit.errors import ProblemError


def import_stats() -> ModuleType:
    """`scipy.stats`, or a `ProblemError` that says how to install it.

    >>> round(float(import_stats().pearsonr([1, 2, 3], [1, 2, 4]).statistic), 3)
    0.982
    """
    try:
        return importlib.import_module("scipy.stats")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "scipy":
            raise  # scipy is there, and something it needs is not: its own message says more
        raise ProblemError(
            "scipy is not installed, and correlations are tested with it. Run pip install 'hessinit[paper]'."
        ) from error
