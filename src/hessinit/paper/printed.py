"""The paper's printed numbers, the tolerance claimed for each, and the verdict: all from `printed.json`."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from functools import cache
from importlib import resources

from hessinit.results.reproduction import Cell
from hessinit.results.result import Plain


def make_cell(
    experiment: str, data: str, row: str, column: str, values: Sequence[float], unit: str = ""
) -> Cell:
    """The mean over seeds with its standard error, beside the printed number where there is one.

    A claim is made about the paper's own data alone; on others the printed number is shown and not judged.
    """
    n = len(values)
    ours = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(n) if n > 1 and math.isfinite(ours) else None
    return judged_cell(experiment, data, row, column, ours, error=error, n=n, unit=unit)


def judged_cell(
    experiment: str, data: str, row: str, column: str, ours: float, *, error: float | None, n: int,
    unit: str = "",
) -> Cell:  # fmt: skip
    """The same for a number that is not a mean, such as a share or a count."""
    table = printed(experiment)
    number = table["rows"].get(row, {}).get(column) if table else None
    paper = None if number is None else float(number)
    rule = _claim(table, row, column) if paper is not None and table["data"] == data else ""
    within = holds(rule, ours, paper) if paper is not None and rule else None
    return Cell(
        row=row, column=column, ours=float(ours), error=error, n=n, rule=rule, within=within, unit=unit,
        paper=paper,
    )  # fmt: skip


def printed(experiment: str) -> Plain:
    """The printed table, or None: `data`, `rows` by row and column, and `claims`."""
    return _all().get(experiment)


@cache
def _all() -> Plain:
    return json.loads(resources.files("hessinit.paper").joinpath("printed.json").read_text("utf-8"))


def _claim(table: Plain, row: str, column: str) -> str:
    """The first claim that names the row and the column, or does not say which; empty where there is none."""
    for claim in table["claims"]:
        if row in claim.get("rows", [row]) and column in claim.get("columns", [column]):
            return str(claim["rule"])
    return ""


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
        raise ValueError(f"{rule!r} is no claim that printed.json may make.")
    amount, difference = float(found[2]), abs(ours - paper)
    if found[1]:
        return ours > 0 and max(ours / paper, paper / ours) <= amount
    return difference <= amount * (abs(paper) / 100 if found[3] == " %" else 1)
