"""How much of the time measuring may take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from hessinit.errors import ProblemError


def now() -> float:
    """Seconds, from wherever."""
    return time.perf_counter()


class Budget:
    """Lets a measurement start only where the share of the time allows it, if it takes as long as the last.

    `began` may lie before a resumed run: what it took and spent then counts.
    """

    def __init__(self, share: float, elapsed: float = 0.0, spent: float = 0.0, last: float = 0.0) -> None:
        self.share = share
        self.spent = spent
        self.last = last
        self._began = now() - elapsed

    @property
    def elapsed(self) -> float:
        """Seconds since the tracking began."""
        return now() - self._began

    def affords(self) -> bool:
        """Whether one more measurement would stay within the share; all of the time is no limit."""
        return self.share == 1 or self.spent + self.last <= self.share * self.elapsed

    def count(self, seconds: float) -> None:
        """Note what a measurement took."""
        self.spent += seconds
        self.last = seconds

    @contextlib.contextmanager
    def counting_more(self) -> Iterator[None]:
        """What comes with a measurement, as logging it does, is part of what it took."""
        started = now()
        try:
            yield
        finally:
            seconds = now() - started
            self.spent += seconds
            self.last += seconds


def check_share(share: object) -> float:
    """A share of the time, above 0.

    >>> check_share(0.1)
    0.1
    """
    if isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1:
        return float(share)
    raise ProblemError(
        f"share={share!r} must be a number above 0, up to 1: the share of the time that measuring may take, "
        "such as 0.1."
    )
