"""Arguments that are refused, with what is allowed in their place."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from hessinit import ProblemError


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ProblemError if `value` is not one of `choices`; the message offers the nearest one."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        hint = offer_nearest(value, choices)
        raise ProblemError(f"{name}={value!r} is unknown; choose from {listed}.{hint}")


def offer_nearest(value: object, choices: Sequence[str]) -> str:
    """Return a sentence that offers the nearest of `choices`; "" where none is near.

    >>> offer_nearest("tabel-1", ["table-1", "word2vec"])
    " Did you mean 'table-1'?"
    """
    near = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_count(name: str, value: object) -> int:
    """Return `value`; raise ProblemError if it is not a whole number of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ProblemError(f"{name}={value!r} must be a whole number, 1 or more.")
    return value
