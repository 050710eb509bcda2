"""The paper's printed numbers (printed.json), tables beside them, and statistics of findings."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hessinit_paper.reproduction import PaperCell, PaperTable

SIGNIFICANT = 0.05  # the usual level: a p-value below it counts as significant


@cache
def printed() -> Any:
    """Return the printed tables by experiment: `data`, `rows` by row and column, and `claims`."""
    return json.loads(resources.files("hessinit_paper").joinpath("printed.json").read_text("utf-8"))


class Measured(NamedTuple):
    """A number over `n` seeds or restarts; the standard error is None where there is none."""

    ours: float
    error: float | None
    n: int
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.ours:.3g}" if self.error is None else f"{self.ours:.3g} ± {self.error:.1g}"


def mean(values: Sequence[float]) -> Measured:
    """Return mean and standard error; no error of one value, nor where the mean is not finite.

    >>> print(mean([1.0, 1.1, 1.2]), mean([2.0]))
    1.1 ± 0.06 2
    """
    ours = statistics.fmean(values)
    n = len(values)
    has_error = n > 1 and math.isfinite(ours)
    return Measured(ours, statistics.stdev(values) / math.sqrt(n) if has_error else None, n)


def percentage(outcomes: Sequence[bool]) -> Measured:
    """Return the share of True in per cent, and its binomial standard error."""
    fraction = statistics.fmean(outcomes)
    n = len(outcomes)
    return Measured(100 * fraction, 100 * math.sqrt(fraction * (1 - fraction) / n), n, "%")


def make_table(
    title: str,
    corner: str,
    numbers: Mapping[tuple[str, str], Measured],
    note: str = "",
    *,
    experiment: str = "",
    data: str = "",
) -> PaperTable:
    """Return a table of numbers by row and column, beside those printed for `experiment`.

    A claim is made about the paper's own data alone; on other data the printed number is shown and
    not judged.
    """
    reference = printed().get(experiment, {"rows": {}, "claims": [], "data": ""})
    claims = reference["claims"] if reference["data"] == data else []
    cells = []
    for (row, column), measured in numbers.items():
        paper = reference["rows"].get(row, {}).get(column)
        rule = _find_rule(claims, row, column) if paper is not None else ""
        cell = PaperCell(
            row=row,
            column=column,
            ours=float(measured.ours),
            error=measured.error,
            n=measured.n,
            unit=measured.unit,
            paper=None if paper is None else float(paper),
            rule=rule,
            within=holds(rule, measured.ours, float(paper)) if rule else None,
        )
        cells.append(cell)
    rows = tuple(dict.fromkeys(row for row, _ in numbers))
    columns = tuple(dict.fromkeys(column for _, column in numbers))
    return PaperTable(
        title=title, corner=corner, rows=rows, columns=columns, cells=tuple(cells), note=note
    )


def _find_rule(claims: Sequence[Any], row: str, column: str) -> str:
    """Return the tolerance that the first claim about that number states; "" where none does."""
    for claim in claims:
        if row in claim.get("rows", [row]) and column in claim.get("columns", [column]):
            return str(claim["rule"])
    return ""


def holds(rule: str, ours: float, paper: float) -> bool:
    """Return whether a claim holds, as it is worded.

    >>> holds("within 50 %", 1.4, 1.0), holds("within a factor of 2", 0.4, 1.0)
    (True, False)
    >>> holds("within 10 points", 69.0, 78.0), holds("at least as many", 9, 10)
    (True, False)
    """
    if not math.isfinite(ours):
        return False
    if rule == "at least as many":
        return ours >= paper
    match = re.fullmatch(r"within (a factor of )?([\d.]+)( %| points)?", rule)
    if match is None:
        raise ValueError(f"{rule!r} is not a claim that printed.json may make.")
    amount = float(match[2])
    if match[1]:
        return ours > 0 and max(ours / paper, paper / ours) <= amount
    return abs(ours - paper) <= amount * (abs(paper) / 100 if match[3] == " %" else 1)


class RankCorrelation(NamedTuple):
    """Spearman's ρ over n points, and the fraction of all orders whose |ρ| is as large."""

    rho: float
    p: float
    n: int


def rank_correlation(
    first: Sequence[float], second: Sequence[float], *, blocks: int = 1
) -> RankCorrelation:
    """Return ρ and its two-sided p-value over every order of the points, which must be few.

    Points may come in `blocks` of equal length, one after another. The points at one position of
    all blocks (one standard deviation in several dimensions) are not independent: the order is
    changed in all blocks alike.

    Infinite values rank last. Where all values on one side are equal, ρ and p are nan.

    >>> rank_correlation([1, 2, 3, 4], [10, 20, 30, 400])  # 2 of 24 orders are as extreme
    RankCorrelation(rho=1.0, p=0.08333333333333333, n=4)
    """
    n = len(first)
    length = n // blocks
    if len(set(first)) < 2 or len(set(second)) < 2:
        return RankCorrelation(math.nan, math.nan, n)
    ranks = _standardized_ranks(first)
    other_ranks = _standardized_ranks(second)
    rho = float(ranks @ other_ranks)
    orders = np.array(list(permutations(range(length))))
    in_all_blocks = np.concatenate([orders + block * length for block in range(blocks)], axis=1)
    # Rounding must not tell apart orders that are equally extreme.
    extreme = int(np.count_nonzero(np.abs(other_ranks[in_all_blocks] @ ranks) >= abs(rho) - 1e-9))
    return RankCorrelation(round(rho, 12) + 0.0, extreme / len(orders), n)  # + 0.0 for a -0.0


def _standardized_ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Return ranks (the mean rank among equals), centred and of length 1."""
    array = np.asarray(values, dtype=np.float64)
    ranks = (array < array[:, None]).sum(1) + ((array == array[:, None]).sum(1) + 1) / 2
    centred = ranks - ranks.mean()
    return np.asarray(centred / np.linalg.norm(centred))
