"""The arena's records: runs as JSON lines while they are made, a compact file for each task afterwards, and
the outcomes from which `scores` are computed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arena.outcomes import Outcome, outcome_of
from arena.tasks import OURS, RECORDED, Task
from hessinit.results.comparison import Comparison
from hessinit.results.result import write_text

RESULTS = Path(__file__).parents[1] / "results"
FROZEN = RESULTS / "arena"  # compare's records of eleven other starts and of the former hessinit
COMPACT = RESULTS / "arena2"
Run = dict[str, Any]


def read_lines(paths: Iterable[Path]) -> list[Run]:
    """The runs of these files; a last line that was cut off is left out."""
    runs = []
    for path in paths:
        for line in path.read_text().splitlines():
            try:
                runs.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return runs


def key_of(run: Run) -> tuple[str, str, float | str, int]:
    return run["task"], run["start"], run["lr"], run["seed"]


def collect(runs: Sequence[Run], folder: Path = COMPACT) -> None:
    """Put runs into the compact files, in the place of older ones of the same task, start, rate and seed."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in sorted({run["task"] for run in runs}):
        kept = {key_of(run): run for run in read_compact(task, folder)}
        kept |= {key_of(run): run for run in runs if run["task"] == task}
        columns = list(dict.fromkeys(name for run in kept.values() for name in run if name != "task"))
        order = sorted(kept, key=lambda key: (key[1], str(key[2]), key[3]))
        rows = [json.dumps([kept[key].get(name) for name in columns], separators=(",", ":")) for key in order]
        head = json.dumps({"task": task, "columns": columns})[:-1]
        write_text(folder / f"{task}.json", head + ', "runs": [\n' + ",\n".join(rows) + "\n]}\n")


def read_compact(task: str, folder: Path = COMPACT) -> list[Run]:
    """The runs of a task; empty where there is no record."""
    path = folder / f"{task}.json"
    if not path.exists():
        return []
    record = json.loads(path.read_text())
    return [{"task": task, **dict(zip(record["columns"], row, strict=True))} for row in record["runs"]]


def frozen_outcome(task: Task, folder: Path = FROZEN) -> Outcome | None:
    """The outcome on record of a task, with the eleven other starts and the former hessinit."""
    path = folder / f"{task.name}.json"
    if task not in RECORDED or not path.exists():
        return None
    return outcome_of(task.name, Comparison.load(path), task.chance, {OURS})


def outcome_with(task: Task, start: str, runs: Sequence[Run], frozen: Outcome | None) -> Outcome | None:
    """The other starts and this one of ours, over the seeds that it has at every rate; None without any.

    The others are those of the frozen outcome, or those among the runs that are complete.
    """
    others: tuple[str, ...] = tuple(each for each in task.starts if not each.startswith(OURS))
    table = {(run["start"], run["lr"], run["seed"]): run["loss"] for run in runs if run["lr"] in task.rates}

    def complete(name: str, seed: int) -> bool:
        return all((name, rate, seed) in table for rate in task.rates)

    seeds = sorted({run["seed"] for run in runs if complete(start, run["seed"])})
    if frozen is not None:
        seeds = [seed for seed in seeds if seed < frozen.losses.shape[2]]
    else:
        seeds = [seed for seed in seeds if all(complete(other, seed) for other in others)]
    if not seeds:
        return None

    def losses_of(name: str) -> list[list[float]]:
        found = [[table[name, rate, seed] for seed in seeds] for rate in task.rates]
        return [[math.nan if loss is None else loss for loss in each] for each in found]

    if frozen is None:
        losses = np.array([losses_of(name) for name in (*others, start)])
        schemes = (*others, start)
    else:
        rows = [row for row, name in enumerate(frozen.schemes) if name != OURS]
        losses = np.concatenate([frozen.losses[rows][:, :, seeds], np.array([losses_of(start)])])
        schemes = (*(frozen.schemes[row] for row in rows), start)
    return Outcome(task=task.name, schemes=schemes, rates=task.rates, losses=losses, chance=task.chance)
