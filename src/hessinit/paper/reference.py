"""The paper's printed numbers (printed.json), tables beside them, and statistics of the findings."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hessinit.results.reproduction import PaperCell, PaperTable
from hessinit.results.result import Plain

SIGNIFICANT = 0.05  # a p-value below it


@cache
def printed() -> Plain:
    """The printed tables by experiment, each with its `data`, `rows` by row and column, and `claims`."""
    return json.loads(resources.files("hessinit.paper").joinpath("printed.json").read_text("utf-8"))


class Measured(NamedTuple):
    """A number over `n` seeds or restarts; the standard error is None where there is none."""

    ours: float
    error: float | None
    n: int
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.ours:.3g}" if self.error is None else f"{self.ours:.3g} ± {self.error:.1g}"


def mean(values: Sequence[float]) -> Measured:
    """Mean and standard error; there is none of one value, nor where the mean is not finite.

    >>> print(mean([1.0, 1.1, 1.2]), mean([2.0]))
    1.1 ± 0.06 2
    """
    ours = statistics.fmean(values)
    n = len(values)
    known = n > 1 and math.isfinite(ours)
    return Measured(ours, statistics.stdev(values) / math.sqrt(n) if known else None, n)


def percentage(outcomes: Sequence[bool]) -> Measured:
    """The share of True in per cent, and its binomial standard error."""
    fraction = statistics.fmean(outcomes)
    n = len(outcomes)
    return Measured(100 * fraction, 100 * math.sqrt(fraction * (1 - fraction) / n), n, "%")


def make_table(
    title: str,
    corner: str,
    cells: Mapping[tuple[str, str], Measured],
    note: str = "",
    *,
    experiment: str = "",
    data: str = "",
) -> PaperTable:
    """A table of numbers by row and column, beside those printed for `experiment`.

    A claim is made about the paper's own data alone; on others the printed number is shown and not
    judged.
    """
    table = printed().get(experiment, {"rows": {}, "claims": [], "data": ""})
    made = []
    claims = table["claims"] if table["data"] == data else []
    for (row, column), found in cells.items():
        number = table["rows"].get(row, {}).get(column)
        paper = None if number is None else float(number)
        about = [
            claim["rule"]
            for claim in claims
            if row in claim.get("rows", [row]) and column in claim.get("columns", [column])
        ]
        rule = ""
        within = None
        if about and paper is not None:
            rule = about[0]
            within = holds(about[0], found.ours, paper)
        made.append(
            PaperCell(
                row=row,
                column=column,
                ours=float(found.ours),
                error=found.error,
                n=found.n,
                unit=found.unit,
                paper=paper,
                rule=rule,
                within=within,
            )
        )
    rows, columns = (tuple(dict.fromkeys(place[at] for place in cells)) for at in (0, 1))
    return PaperTable(
        title=title, corner=corner, rows=rows, columns=columns, cells=tuple(made), note=note
    )


def holds(rule: str, ours: float, paper: float) -> bool:
    """Whether a claim holds, as it is worded.

    >>> holds("within 50 %", 1.4, 1.0), holds("within a factor of 2", 0.4, 1.0)
    (True, False)
    >>> holds("within 10 points", 69.0, 78.0), holds("at least as many", 9, 10)
    (True, False)
    """
    if not math.isfinite(ours):
        return False
    if rule == "at least as many":
        return ours >= paper
    if (found := re.fullmatch(r"within (a factor of )?([\d.]+)( %| points)?", rule)) is None:
        raise ValueError(f"{rule!r} is not a claim that printed.json may make.")
    amount = float(found[2])
    if found[1]:
        return ours > 0 and max(ours / paper, paper / ours) <= amount
    return abs(ours - paper) <= amount * (abs(paper) / 100 if found[3] == " %" else 1)


class RankCorrelation(NamedTuple):
    """Spearman's ρ over n points, and the fraction of all orders whose |ρ| is as large."""

    rho: float
    p: float
    n: int


def rank_correlation(
    first: Sequence[float], second: Sequence[float], *, blocks: int = 1
) -> RankCorrelation:
    """ρ with its two-sided p-value over every order of the points; for few of them, as all orders are listed.

    Points in `blocks` of equal length, one after another, whose places mean the same (the same
    standard deviation in another dimension) are not independent: their order is changed in all
    blocks alike.

    Infinite values rank last. Where all of one kind are equal, ρ and p are nan.

    >>> rank_correlation([1, 2, 3, 4], [10, 20, 30, 400])  # 2 of 24 orders are as extreme
    RankCorrelation(rho=1.0, p=0.08333333333333333, n=4)
    """
    n = len(first)
    places = len(first) // blocks
    if len(set(first)) < 2 or len(set(second)) < 2:
        return RankCorrelation(math.nan, math.nan, n)
    left = _standardized_ranks(first)
    right = _standardized_ranks(second)
    rho = float(left @ right)
    orders = np.array(list(permutations(range(places))))
    everywhere = np.concatenate([orders + block * places for block in range(blocks)], axis=1)
    # Rounding must not tell apart orders that are equally extreme.
    extreme = int(np.count_nonzero(np.abs(right[everywhere] @ left) >= abs(rho) - 1e-9))
    return RankCorrelation(round(rho, 12) + 0.0, extreme / len(orders), n)  # + 0.0 for a -0.0


def _standardized_ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks, the mean rank among equals, centred and of length 1."""
    array = np.asarray(values, dtype=np.float64)
    ranks = (array < array[:, None]).sum(1) + ((array == array[:, None]).sum(1) + 1) / 2
    centred = ranks - ranks.mean()
    return np.asarray(centred / np.linalg.norm(centred))
