"""The arena's records: runs as JSON lines while they are made, a compact file for each task afterwards, and
the outcomes from which `scores` are computed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arena.outcomes import Outcome, outcome_of
from arena.scores import Reference
from arena.tasks import EVERY, OURS, RACED, RECORDED, Task
from hessinit.results.comparison import Comparison
from hessinit.results.result import write_text

RESULTS = Path(__file__).parents[1] / "results"
FROZEN = RESULTS / "arena"  # compare's records of eleven other starts and of the former hessinit
COMPACT = RESULTS / "arena2"
REFERENCES = "references.json"
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
        rows = [
            json.dumps([kept[key].get(name) for name in columns], separators=(",", ":"), ensure_ascii=False)
            for key in order
        ]
        head = json.dumps({"task": task, "columns": columns})[:-1]
        write_text(_path(task, folder), head + ', "runs": [\n' + ",\n".join(rows) + "\n]}\n")


def _path(task: str, folder: Path) -> Path:
    return folder / f"{task.replace(',', '').replace(' ', '-').lower()}.json"


def read_compact(task: str, folder: Path = COMPACT) -> list[Run]:
    """The runs of a task; empty where there is no record."""
    path = _path(task, folder)
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


@dataclass(frozen=True)
class Arena:
    """All records: the runs of every task, the frozen outcomes, and what losses are held against."""

    runs: dict[str, list[Run]]
    frozen: dict[str, Outcome]
    references: dict[str, Reference]

    @classmethod
    def load(cls, folder: Path = COMPACT) -> Arena:
        runs = {task.name: read_compact(task.name, folder) for task in EVERY}
        frozen = {task.name: found for task in RECORDED if (found := frozen_outcome(task)) is not None}
        references = {name: Reference.of(outcome) for name, outcome in frozen.items()}
        for task in EVERY:
            found = [outcome_with(task, start, runs[task.name], None) for start in (OURS, RACED)]
            losses = [Reference.of(each) for each in found if each is not None]
            if task.name not in references and losses:
                rates = tuple(rate for rate in task.rates if any(rate in each.rates for each in losses))
                references[task.name] = Reference(min(each.best for each in losses), rates)
        path = folder / REFERENCES
        if path.exists():
            kept = json.loads(path.read_text())
            references |= {name: Reference(best, tuple(rates)) for name, (best, rates) in kept.items()}
        return cls({name: found for name, found in runs.items() if found}, frozen, references)

    def outcomes(self, tasks: Iterable[Task], start: str) -> list[Outcome]:
        """The tasks of which this start of ours has a complete seed, each beside the other starts."""
        found = (
            outcome_with(task, start, self.runs.get(task.name, []), self.frozen.get(task.name))
            for task in tasks
        )
        return [each for each in found if each is not None]

    def accuracy(self, task: Task, start: str) -> dict[float, float]:
        """Held-out accuracy by rate, averaged over seeds; a run that failed guesses."""
        found: dict[float, list[float]] = {}
        for run in self.runs.get(task.name, []):
            if run["start"] == start and run["lr"] in task.rates:
                found.setdefault(run["lr"], []).append(run.get("accuracy") or math.exp(-task.chance))
        return {rate: float(np.mean(found[rate])) for rate in task.rates if rate in found}

    def freeze(self, folder: Path = COMPACT) -> None:
        """Keep the references of the tasks that have none on record, for all later scores."""
        kept = {
            name: (each.best, each.rates) for name, each in self.references.items() if name not in self.frozen
        }
        write_text(folder / REFERENCES, json.dumps(kept, indent=1) + "\n")
