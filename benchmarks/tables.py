"""The results as tables on stdout. `python benchmarks/tables.py` shows the recorded run again."""

from __future__ import annotations

import json
from pathlib import Path

from problems import ACCURACY
from reading import (
    RACES,
    RIGHT,
    count_text,
    fitted_exponent,
    gradient_seconds,
    growth,
    memory_ratio,
    race_contestants,
    race_problems,
)
from rich.console import Console
from rich.table import Table

_WIDTH = 118


def show(results: dict) -> None:
    console = Console(width=_WIDTH, highlight=False)
    cells, run = results["cells"], results["run"]
    machine = f"{run['hardware']['processor']}, {run['threads']} threads"
    console.print(f"{machine}, torch {run['versions']['torch']}, tolerance {run['tolerance']}")
    for curvature, activation, title in RACES:
        problems = race_problems(cells, activation)
        if problems:
            console.print(_race_table(cells, curvature, problems, title))
            console.print(_memory_table(cells, curvature, problems, title))
    for curvature in ("gauss-newton", "hessian"):
        console.print(_accuracy_table(cells, curvature))
    for kind in ("depth", "batch"):
        for curvature in ("gauss-newton", "hessian"):
            _show_growth(console, cells, kind, curvature)
    _show_failures(console, cells)


def _table(title: str, first: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _race_table(cells: dict, curvature: str, problems: list[str], title: str) -> Table:
    headers = [f"{name.rsplit('-', 1)[0]}\n{gradient_seconds(cells, name) * 1e3:.3g} ms" for name in problems]
    heading = f"\n{title}: all layers, in gradients · largest relative error of a layer (* above {RIGHT})"
    table = _table(heading, "contestant\none gradient", headers)
    for contestant in race_contestants(cells, curvature):
        found = [cells.get(f"{problem}/{curvature}/{contestant}") for problem in problems]
        table.add_row(contestant, *(_race_text(cell) for cell in found))
    return table


def _race_text(cell: dict | None) -> str:
    if cell is None or cell["status"] == "missing":
        return "–"
    if cell["status"] == "error":
        return "fails"
    bound = "> " if cell["status"] == "capped" else ""
    return (
        f"{bound}{count_text(cell['gradients'])} · {_error_text(cell)}"
        if "gradients" in cell
        else "not ready"
    )


def _error_text(cell: dict) -> str:
    if "max_error" not in cell:
        return "?"
    return f"{cell['max_error']:.0e}" + ("*" if not cell["max_error"] <= RIGHT else " ")


def _memory_table(cells: dict, curvature: str, problems: list[str], title: str) -> Table:
    headers = [name.rsplit("-", 1)[0] for name in problems]
    table = _table(f"\n{title}: peak memory, MiB · in training steps", "contestant", headers)
    for contestant in [*race_contestants(cells, curvature), "training step"]:
        row = []
        for problem in problems:
            cell = cells.get(f"{problem}/{curvature}/{contestant}", {})
            ratio = memory_ratio(cells, problem, curvature, contestant)
            bound = "> " if cell.get("status") == "capped" else ""
            row.append(
                "–" if ratio is None else f"{bound}{count_text(cell['peak_mib'])} · {count_text(ratio)}"
            )
        table.add_row(contestant, *row)
    return table


def _accuracy_table(cells: dict, curvature: str) -> Table:
    heading = f"\n{curvature}, hard cases: largest relative error of a layer (* above {RIGHT})"
    table = _table(heading, "contestant", ACCURACY)
    for contestant in race_contestants(cells, curvature):
        row = []
        for problem in ACCURACY:
            cell = cells.get(f"{problem}/{curvature}/{contestant}", {"status": "missing"})
            failed = {"missing": "–", "error": "fails"}.get(cell["status"])
            row.append(failed or _error_text(cell))
        table.add_row(contestant, *row)
    return table


def _show_growth(console: Console, cells: dict, kind: str, curvature: str) -> None:
    for contestant in ("hessinit", "PyHessian"):
        rows = growth(cells, kind, curvature, contestant)
        if len(rows) > 1:
            sizes, seconds, gradients = zip(*rows, strict=True)
            powers = [fitted_exponent(sizes, times) for times in (seconds, gradients)]
            texts = [f"{size}: {time * 1e3:.3g} ms, {time / unit:.3g}" for size, time, unit in rows]
            heading = f"{contestant}, {curvature}, {kind} → time, gradients"
            fits = f"seconds ~ {kind}^{powers[0]:.2f}, one gradient ~ {kind}^{powers[1]:.2f}"
            console.print(f"\n{heading}; {fits}")
            console.print("  " + "  |  ".join(texts))


def _show_failures(console: Console, cells: dict) -> None:
    troubled = [(key, cell) for key, cell in sorted(cells.items()) if cell["status"] in ("error", "capped")]
    if troubled:
        console.print("\nfailed or stopped at the cap:")
    for key, cell in troubled:
        console.print(f"  {key}: {cell['message']}"[:_WIDTH], markup=False)


if __name__ == "__main__":
    show(json.loads((Path(__file__).parent / "results" / "curvature_cost.json").read_text()))
