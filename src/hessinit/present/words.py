"""Numbers and names as people read them, columns, notes, and the colours of curves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, TypeVar

from hessinit.present.document import Color, Column, Numbers, Paragraph, Series
from hessinit.results.curvature_report import Estimate

LONGEST_NAME = 80  # letters: a longer one would bury the sentence or the table that it stands in
# Control characters, marks that reorder text, lone surrogates: a name from a file must not control
# the terminal.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

T = TypeVar("T")
R = TypeVar("R")
U = TypeVar("U")

LOGARITHMIC_FROM = 5.0  # ratio of the largest to the smallest value on an axis
CURVES = ("blue", "orange", "green", "purple", "sky", "grey")  # vermilion is hessinit's


def format_number(number: float, digits: int = 3) -> str:
    """Write a number with so many significant figures.

    Below 1e-4 and from 1e5 on it is in scientific form, with two figures.

    >>> [format_number(x) for x in (64.0, 0.30649, 1234.5, 1.234e-7, -99999.0, 0.0, float("inf"))]
    ['64', '0.306', '1230', '1.2e-07', '-1.0e+05', '0', 'inf']
    """
    if not math.isfinite(number):
        return str(float(number))
    rounded = float(f"{number:.{digits - 1}e}")
    if rounded == 0:
        return "0"
    if not 1e-4 <= abs(rounded) < 1e5:
        return f"{number:.1e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def format_ratio(ratio: float) -> str:
    """Write a ratio near 1 with two decimals, so that 1.00 and 1.04 differ."""
    return f"{ratio:.2f}" if 0.01 <= ratio < 99.995 else format_number(ratio)


def format_times(ratio: float) -> str:
    """Write a factor for a sentence: two figures below 100, three above."""
    return format_number(ratio, 2 if ratio < 100 else 3)


def format_estimate(estimate: Estimate | None) -> str:
    """Write an estimate's value, with `~` before it when it did not converge; "" for None."""
    if estimate is None:
        return ""
    return mark_doubt(format_number(estimate.value), estimate.converged)


def mark_doubt(text: str, converged: bool) -> str:
    """Write `~` before a number that did not converge."""
    return f"{text_if(not converged, '~')}{text}"


def text_if(condition: object, text: str) -> str:
    """Return a clause that a sentence has only where the condition holds; "" elsewhere."""
    return text if condition else ""


def map_known(values: Iterable[T | None], function: Callable[[T], R], unknown: U) -> list[R | U]:
    """Apply the function to each value; `unknown` stands where there is none."""
    return [unknown if value is None else function(value) for value in values]


def format_mean(mean: float, error: float) -> str:
    """Write a mean with three figures, and its standard error (nan: none) with as many decimals.

    An error that would show as 0 has two figures.

    >>> format_mean(0.23456, 0.0123), format_mean(0.2, math.nan), format_mean(1.1, 0.00123)
    ('0.235 ± 0.012', '0.200', '1.10 ± 0.0012')
    """
    size = abs(float(f"{mean:.2e}")) if math.isfinite(mean) else math.inf
    shown = format_number(mean)
    shown_error = "0"
    if 1e-4 <= size < 1e5:
        decimals = max(0, 2 - math.floor(math.log10(size)))
        shown = f"{mean:.{decimals}f}"
        shown_error = f"{error:.{decimals}f}"
    if math.isnan(error):
        return shown
    return f"{shown} ± {shown_error if float(shown_error) else format_number(error, 2)}"


def format_range(numbers: Iterable[float], to: str = " to ", digits: int = 3) -> str:
    """Write the smallest and the largest number, once if they look the same; nan is left out."""
    comparable = [number for number in numbers if not math.isnan(number)]
    if not comparable:
        return ""
    return to.join(dict.fromkeys([format_number(end(comparable), digits) for end in (min, max)]))


def format_percent(fraction: float, digits: int = 3) -> str:
    return f"{format_number(100 * fraction, digits)} %"


def printable(text: str) -> str:
    r"""Show control characters instead of obeying them: `a\x1b[2J`."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def shorten(name: str, most: int = LONGEST_NAME) -> str:
    """Cut the middle out of a long name: its beginning and its end say most."""
    if len(name) <= most:
        return name
    half = (most - 1) // 2
    return f"{name[: most - 1 - half]}…{name[len(name) - half :]}"


def call_layer(name: str) -> str:
    """Name a layer in a sentence; those of an nn.Sequential are numbers: "Layer 0"."""
    return text_if(name[:1].isdigit(), "Layer ") + shorten(printable(name))


def name_rows(rows: Iterable[Any]) -> list[str]:
    """Return the names of layers with those of tied weights: "embed = head"."""
    return [" = ".join((row.name, *row.aliases)) for row in rows]


def count(number: int, noun: str) -> str:
    """Write a number with its noun: "1 layer", "1,200 examples"."""
    return f"{number:,} {noun}{text_if(number != 1, 's')}"


def inflect(subjects: Sequence[object], singular: str, plural: str) -> str:
    """Return the verb's form for so many subjects."""
    return singular if len(subjects) == 1 else plural


def tell_time(seconds: float | None, gradients: float | None = None) -> str:
    """Write the cost, as " in 0.09 s (4.1 gradients)"."""
    if seconds is None:
        return ""
    cost = f" in {format_number(seconds, 2)} s"
    return cost if gradients is None else f"{cost} ({format_number(gradients, 2)} gradients)"


def title(text: str, facts: Mapping[str, Any] | None) -> str:
    """Write a title that names the model's class, where it is known."""
    model = (facts or {}).get("model")
    return text + text_if(model, f": {shorten(str(model))}")


def format_bytes(number: float) -> str:
    """Write bytes in the largest unit that fits: "3 kB", "1.2 GB"."""
    power = min(4, int(math.log10(max(number, 1)) // 3))
    return f"{format_number(number / 1000**power, 2)} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def tell_batches(batches: int) -> str:
    return text_if(batches > 1, f" in {batches} batches")


def unstopped(sentence: str) -> str:
    """Return the sentence without its full stop."""
    return sentence.strip().rstrip(".")


def join_names(names: Sequence[str], most: int = 3) -> str:
    """List names in a sentence, the first few of many: "a, b, c and 2 more"."""
    shown = [shorten(printable(name)) for name in names]
    if len(shown) > most + 1:
        shown = [*shown[:most], f"{len(shown) - most} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def name_column(
    heading: str, cells: Iterable[str], importance: int = 9, *, wraps: bool = False
) -> Column:
    """Return a column of words."""
    return Column(heading, list(cells), importance, is_number=False, wraps=wraps)


def note_paragraphs(texts: Iterable[str]) -> list[Paragraph]:
    return [Paragraph(f"Note: {text}", "note") for text in texts]


def write_pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Write names and plain values as text; None is a dash."""
    return [(name.replace("_", " "), _write_value(value)) for name, value in values.items()]


def write_fields(result: object, names: Iterable[str]) -> list[tuple[str, str]]:
    """Write these fields of a result."""
    return write_pairs({name: getattr(result, name) for name in names})


def _write_value(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value)


def write_versions(first: str, versions: Mapping[str, str]) -> str:
    """Write the footer of a page: seeds, then names and versions of packages."""
    return f"{', '.join([first, *map(' '.join, versions.items())])}."


def spans_much(values: Sequence[float]) -> bool:
    """Return whether values from 0 on span so much that their axis should be logarithmic."""
    return bool(values) and min(values) >= 0 and max(values) > LOGARITHMIC_FROM * min(values)


def looks(names: Sequence[str]) -> dict[str, tuple[Color, bool]]:
    """Return the colour of each curve, hessinit's standing out, and whether it is dashed.

    A scheme with "+warmup" has the colour of the one without it, dashed.
    """
    bases = {name: name.removesuffix("+warmup") for name in names}
    schemes = [base for base in dict.fromkeys(bases.values()) if base != "hessinit"]
    colors = dict(zip(schemes, cycle(CURVES), strict=False))
    return {name: (colors.get(base, "vermilion"), name != base) for name, base in bases.items()}


def crosses(
    name: str,
    y: Numbers,
    x: Numbers,
    color: Color,
    dashed: bool = False,
    details: Sequence[str] | None = None,
) -> Series:
    """Return crosses where the curve of that name diverges."""
    return Series(
        name, y, x, color, dashed, points=True, symbol="cross", in_legend=False, details=details
    )


def ramp(values: Sequence[float]) -> list[str]:
    """Return a colour for each value, from dark (small) to light, evenly by rank."""
    ranks = {value: rank for rank, value in enumerate(sorted(set(values)))}
    return [f"ramp:{ranks[value] / max(1, len(ranks) - 1):.3g}" for value in values]
