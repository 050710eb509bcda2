"""The paper's printed numbers (printed.json), table cells beside them, and statistics of the findings."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from hessinit.results.reproduction import PaperCell, PaperTable
from hessinit.results.result import Plain

MOST_ENUMERATED = 8  # 8! = 40,320 orders; of more points a sample is drawn
SAMPLE = 9_999


@cache
def printed() -> Plain:
    """The printed tables by experiment, each with its `data`, `rows` by row and column, and `claims`."""
    return json.loads(resources.files("hessinit.paper").joinpath("printed.json").read_text("utf-8"))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error; the error is nan for one value, or where the mean is not finite.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    mean = statistics.fmean(values)
    known = len(values) > 1 and math.isfinite(mean)
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if known else math.nan


def mean_cell(
    row: str, column: str, values: Sequence[float], experiment: str = "", data: str = ""
) -> PaperCell:
    """The mean over seeds with its standard error, beside the printed number where there is one."""
    ours, error = mean_and_error(values)
    known = None if math.isnan(error) else error
    return judged_cell(row, column, ours, len(values), error=known, experiment=experiment, data=data)


def judged_cell(
    row: str, column: str, ours: float, n: int, *, error: float | None, experiment: str = "", data: str = "",
    unit: str = "",
) -> PaperCell:  # fmt: skip
    """A number beside the printed one, and whether the claim about it holds.

    A claim is made about the paper's own data alone; on others the printed number is shown and not judged.
    """
    table = printed().get(experiment, {"rows": {}})
    number = table["rows"].get(row, {}).get(column)
    paper = None if number is None else float(number)
    rule, within = "", None
    if paper is not None and table["data"] == data:
        for claim in reversed(table["claims"]):  # the first that fits wins
            if row in claim.get("rows", [row]) and column in claim.get("columns", [column]):
                rule = claim["rule"]
        within = holds(rule, ours, paper) if rule else None
    return PaperCell(
        row=row, column=column, ours=float(ours), error=error, n=n, rule=rule, within=within, unit=unit,
        paper=paper,
    )  # fmt: skip


def make_table(title: str, corner: str, cells: Iterable[PaperCell], note: str = "") -> PaperTable:
    """A table with the rows and columns of its cells, in their order."""
    cells = tuple(cells)
    rows, columns = (
        tuple(dict.fromkeys(getattr(cell, side) for cell in cells)) for side in ("row", "column")
    )
    return PaperTable(title=title, corner=corner, rows=rows, columns=columns, cells=cells, note=note)


def holds(rule: str, ours: float, paper: float) -> bool:
    """Whether a claim holds, as it is worded.

    >>> holds("within 50 %", 1.4, 1.0), holds("within a factor of 2", 0.4, 1.0)
    (True, False)
    >>> holds("within 10 points", 69.0, 78.0), holds("within 0.05", 0.36, 0.33)
    (True, True)
    >>> holds("at least as many", 9, 10)
    False
    """
    if not math.isfinite(ours):
        return False
    if rule == "at least as many":
        return ours >= paper
    found = re.fullmatch(r"within (a factor of )?([\d.]+)( %| points)?", rule)
    if found is None:
        raise ValueError(f"{rule!r} is not a claim that printed.json may make.")
    amount, difference = float(found[2]), abs(ours - paper)
    if found[1]:
        return ours > 0 and max(ours / paper, paper / ours) <= amount
    return difference <= amount * (abs(paper) / 100 if found[3] == " %" else 1)


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's ρ over n points, and the fraction of all orders whose |ρ| is as large."""

    rho: float
    p: float
    n: int


def rank_correlation(first: Sequence[float], second: Sequence[float], *, blocks: int = 1) -> RankCorrelation:
    """ρ with its two-sided permutation p-value: every order of up to 8 places, else 9,999 drawn ones.

    Points in `blocks` of equal length, one after another, whose places mean the same (the same standard
    deviation in another dimension) are not independent: their order is changed in all blocks alike.

    Infinite values rank last. With fewer than three points, or all of one kind equal, ρ and p are nan.

    >>> rank_correlation([1, 2, 3, 4], [10, 20, 30, 400])  # 2 of 24 orders are as extreme
    RankCorrelation(rho=1.0, p=0.08333333333333333, n=4)
    """
    n = len(first)
    if n != len(second) or n % blocks:
        raise ValueError(f"{n} values cannot be paired with {len(second)} in {blocks} equal blocks.")
    if n < 3 or len(set(first)) < 2 or len(set(second)) < 2:
        return RankCorrelation(math.nan, math.nan, n)
    left, right = _standardized_ranks(first), _standardized_ranks(second)
    rho = float(left @ right)
    places = n // blocks
    if places <= MOST_ENUMERATED:
        orders = np.array(list(permutations(range(places))))
    else:
        orders = np.random.default_rng(0).permuted(np.tile(np.arange(places), (SAMPLE, 1)), axis=1)
    everywhere = np.concatenate([orders + block * places for block in range(blocks)], axis=1)
    # Rounding must not tell apart orders that are equally extreme.
    extreme = int(np.count_nonzero(np.abs(right[everywhere] @ left) >= abs(rho) - 1e-9))
    # The order found is one of those listed; among drawn ones it has to be counted in.
    p = extreme / len(orders) if places <= MOST_ENUMERATED else (1 + extreme) / (1 + SAMPLE)
    return RankCorrelation(round(rho, 12) + 0.0, p, n)  # + 0.0 for a -0.0


def _standardized_ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks, the mean rank among equals, centred and of length 1."""
    array = np.asarray(values, dtype=np.float64)
    ranks = (array < array[:, None]).sum(1) + ((array == array[:, None]).sum(1) + 1) / 2
    centred = ranks - ranks.mean()
    return np.asarray(centred / np.linalg.norm(centred))
