"""What every contestant is given alike, and the shape of its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

TOLERANCE = 1e-3
POWER_STEPS = 100  # PyHessian's own default, given to every power iteration.
LANCZOS_STEPS = 20  # hessian-eigenthings stops after two by default for one eigenvalue: far too few.

Norms = Iterator[tuple[str, float]]
Run = Callable[[], Norms]


class NotOfferedError(Exception):
    """The installed version lacks what the contestant is named for: not run, rather than failed."""
