"""Arguments that are refused, with what is allowed in their place."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from hessinit import ProblemError


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ProblemError if `value` is not one of `choices`; the message offers the nearest one."""
    if value in choices:
        return
    near = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(map(repr, choices))
    raise ProblemError(f"{name}={value!r} is unknown; choose from {listed}.{hint}")


def check_count(name: str, value: object) -> int:
    """Return `value`; raise ProblemError if it is not a whole number of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ProblemError(f"{name}={value!r} must be a whole number, 1 or more.")
    return value
