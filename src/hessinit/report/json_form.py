"""Reports as strict JSON: numbers that JSON has no word for travel as the strings "inf", "-inf" and "nan"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

Plain = Any  # None, bool, int, float, str, and lists and dicts of them: what json.loads returns


def to_plain(value: object) -> Plain:
    """Turn dataclasses, tuples and mappings into what strict JSON can hold; a float keeps every bit.

    >>> from hessinit.estimate import Estimate
    >>> to_plain((Estimate(float("inf"), 0.0, False, "overflow"), "inf"))[0]["value"]
    'inf'
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    raise TypeError(
        f"a report cannot hold {value!r}, a {type(value).__name__}; "
        "it holds plain data, so convert it to a float, an int or a str first."
    )


def read_number(value: Plain) -> float:
    """Read a number back, whichever way it travelled.

    >>> read_number("-inf"), read_number(0.1)
    (-inf, 0.1)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} stands where a number belongs")
    return float(value)


def read_numbers(values: Plain) -> tuple[float, ...]:
    return tuple(read_number(value) for value in values)
