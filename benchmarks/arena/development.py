"""What was tried for the constants of `initialize_`, on the development tasks only.

    HESSINIT_DATA=folder python benchmarks/arena/run.py --set development --folder build/development \\
        --start default lsuv "hessinit[KAPPA.plain=3]" "hessinit[KAPPA.plain=6]"
    python benchmarks/arena/development.py build/development/*.jsonl     a table of those runs
    python benchmarks/arena/development.py                               the table of the former constants

A start may carry any constant of `hessinit.init.options` or argument of `initialize_` in brackets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from arena.outcomes import count_losses  # noqa: E402
from arena.records import read_lines  # noqa: E402
from arena.tasks import BY_NAME, CPU  # noqa: E402

FORMER = Path(__file__).parents[1] / "results" / "arena-development.json"
PLAIN = ("default", "he", "glorot", "orthogonal", "lsuv", "lsuv+warmup")


def show_runs(runs: Sequence[dict[str, Any]], console: Console) -> None:
    """For each start: mean and worst excess over the best cell of these runs, and held-out accuracy."""
    starts = list(dict.fromkeys(run["start"] for run in runs))
    for task in dict.fromkeys(run["task"] for run in runs):
        chance = BY_NAME[task].chance
        cells: dict[tuple[str, float], list[dict[str, Any]]] = {}
        for run in runs:
            if run["task"] == task:
                cells.setdefault((run["start"], run["lr"]), []).append(run)
        losses = {
            cell: float(
                count_losses([np.nan if run["loss"] is None else run["loss"] for run in found], chance).mean()
            )
            for cell, found in cells.items()
        }
        best = min(losses.values())
        rates = sorted({rate for _, rate in cells})
        columns = [f"{rate:g}" for rate in rates]
        table = Table("start", "mean", *columns, "accuracy", *columns, title=f"{task}: loss / {best:.4g} − 1")
        for start in starts:
            excess = [losses[start, rate] / best - 1 for rate in rates if (start, rate) in losses]
            right = [
                np.mean([run.get("accuracy") or np.exp(-chance) for run in cells[start, rate]])
                for rate in rates
                if (start, rate) in cells
            ]
            if len(excess) == len(rates):
                texts = [f"{100 * value:+.0f} %" for value in (np.mean(excess), *excess)]
                table.add_row(start, *texts, *(f"{100 * value:.1f}" for value in (np.mean(right), *right)))
        console.print(table)


def show_former(record: dict[str, Any], console: Console) -> None:
    """The regret of each variant against the best plain scheme at the same rate: by task, mean and worst."""
    chance = {task.name: task.chance for task in CPU}
    for normalized in (False, True):
        tasks = [name for name in record["tasks"] if (name == "pre-ln") == normalized]
        table = Table("scheme", *tasks, "mean", "worst", title="Loss against the best plain scheme")
        for variant in record["tasks"][tasks[0]]:
            cells = {
                task: [
                    _regret(record["tasks"][task], variant, rate, chance[task])
                    for rate in record["tasks"][task]["lsuv"]
                ]
                for task in tasks
            }
            every = [value for each in cells.values() for value in each]
            whole = [*(np.mean(each) for each in cells.values()), np.mean(every), max(every)]
            table.add_row(variant, *(f"{100 * value:+.1f} %" for value in whole))
        console.print(table)
    console.print(f"{record['seeds']} seeds; made with torch {record['torch']}.")


def _regret(losses: dict[str, dict[str, list[float]]], variant: str, rate: str, chance: float) -> float:
    mean = {scheme: float(np.mean(count_losses(by_rate[rate], chance))) for scheme, by_rate in losses.items()}
    return mean[variant] / min(mean[scheme] for scheme in PLAIN) - 1


if __name__ == "__main__":
    console = Console(width=200, highlight=False)
    files = [Path(each) for each in sys.argv[1:] if each != "--show"]
    if files:
        show_runs(read_lines(files), console)
    else:
        show_former(json.loads(FORMER.read_text()), console)
