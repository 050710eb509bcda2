"""The user's own gains: which weights a name or a glob means."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hessinit.errors import ProblemError, did_you_mean
from hessinit.schemes.targets import Target


def resolve_gains(targets: Sequence[Target], gains: Mapping[str, float] | None) -> dict[str, float]:
    """Names and globs to keys; a pattern that fits no weight is refused."""
    if gains is not None and not isinstance(gains, Mapping):
        raise ProblemError(f"gains is a {type(gains).__name__}; it must map names to gains: {{'fc2': 1.5}}.")
    found: dict[str, float] = {}
    names_of = {target.key: {target.name, target.key, *target.aliases} for target in targets}
    whole = {name for names in names_of.values() for name in names}
    # A name beats a glob, whatever their order.
    for pattern, gain in sorted((gains or {}).items(), key=lambda entry: entry[0] in whole):
        if not isinstance(pattern, str):
            raise ProblemError(f"gains holds the key {pattern!r}; keys are names or globs, such as 'fc2'.")
        if not _is_gain(gain):
            raise ProblemError(f"gains[{pattern!r}] is {gain!r}; a gain is a positive number.")
        fitting = [
            key
            for key, names in names_of.items()
            if pattern in names or any(fnmatch.fnmatchcase(name, pattern) for name in names)
        ]
        if not fitting:
            names = [target.name for target in targets]
            raise ProblemError(
                f"gains names {pattern!r}, which fits no weight; there are {', '.join(names[:8])}."
                + did_you_mean(str(pattern), names)
            )
        found.update(dict.fromkeys(fitting, float(gain)))
    return found


def _is_gain(value: Any) -> bool:
    try:
        return not isinstance(value, (bool, str)) and 0 < float(value) < math.inf
    except (TypeError, ValueError):
        return False
