"""What `initialize_` must reach in the arena, held against the records: one row a requirement.

"Now" is what the former hessinit of the frozen record gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from arena import tasks as sets
from arena.outcomes import Outcome, rivals
from arena.records import Arena
from arena.scores import divergences, excesses, mean_ranks, rate_robustness, regret
from arena.tasks import AUTO, CPU, GPU, LONG, NORMALIZED, OURS, RACED, RECORDED, RESNET20, Task

HARD = ("residual-20", "tanh-30")
NEW = (*NORMALIZED, *RESNET20, *sets.TRANSFORMERS_ADAMW)
SHORT = (*RECORDED, *NORMALIZED, *RESNET20, *GPU)
Score = Callable[[Arena, Sequence[Task]], str]


@dataclass(frozen=True)
class Row:
    """A requirement; `score` gives its number for some of `tasks`, or an empty text without records."""

    text: str
    now: str
    wanted: str
    tasks: Sequence[Task]
    score: Score

    def got(self, arena: Arena, development: bool = True) -> str:
        return self.score(arena, [task for task in self.tasks if development or not task.development])


def _robustness(start: str) -> Score:
    def score(arena: Arena, tasks: Sequence[Task]) -> str:
        found = arena.outcomes(tasks, start)
        if not found:
            return ""
        others = {name for outcome in found for name in outcome.schemes} - {start}
        ours, picked = (rate_robustness(found, arena.references, names) for names in ({start}, others))
        return f"{ours:.3f} ({len(found)} of {len(tasks)} tasks; best other picked {picked:.3f})"

    return score


def _of_raced(score: Callable[[list[Outcome]], str]) -> Score:
    def whole(arena: Arena, tasks: Sequence[Task]) -> str:
        found = arena.outcomes(tasks, RACED)
        return score(found) if found else ""

    return whole


def _rank(outcomes: list[Outcome]) -> str:
    return f"{mean_ranks(outcomes)[RACED].rank:.2f}"


def _regret(outcomes: list[Outcome]) -> str:
    return f"{100 * regret(outcomes, RACED, {RACED}).mean:+.1f} %"


def _behind(outcomes: list[Outcome]) -> str:
    cells = regret(outcomes, RACED, {RACED}).cells
    behind = {cell: value for cell, value in cells.items() if value > 0.05}
    names = ", ".join(f"{task} {rate:g} {100 * value:+.0f} %" for (task, rate), value in behind.items())
    return f"{100 * len(behind) / len(cells):.1f} % ({len(behind)} of {len(cells)}) {names}"


def _failures(outcomes: list[Outcome]) -> str:
    found = divergences(outcomes, RACED, {RACED})
    return f"{len(found)} " + ", ".join(f"{task} {rate:g}" for task, rate in found)


def _cells(arena: Arena, tasks: Sequence[Task]) -> str:
    """The mean and the largest excess over the best of the grid, Adam's lowest rate apart."""
    cells = {
        (outcome.task, rate): value
        for outcome in arena.outcomes(tasks, OURS)
        for rate, value in excesses(outcome, arena.references[outcome.task], {OURS}).items()
    }
    if not cells:
        return ""
    lowest = [value for (name, rate), value in cells.items() if name.endswith("adam") and rate == 1e-4]
    rest = {
        cell: value for cell, value in cells.items() if not (cell[0].endswith("adam") and cell[1] == 1e-4)
    }
    worst = max(rest, key=rest.__getitem__)
    mean, most = 100 * np.mean(list(cells.values())), 100 * rest[worst]
    text = f"mean {mean:.1f} %, worst {most:.0f} % ({worst[0]} {worst[1]:g})"
    return text + (f", Adam's lowest {100 * max(lowest):.0f} %" if lowest else "")


def _accuracy_at_every_rate(arena: Arena, tasks: Sequence[Task]) -> str:
    texts = []
    for task in tasks:
        ours, own = arena.accuracy(task, OURS), arena.accuracy(task, "default")
        ours = {rate: value for rate, value in ours.items() if rate != task.rates[0]}
        if ours and own:
            shown = " ".join(f"{100 * value:.1f}" for value in ours.values())
            best = 100 * max(own.values())
            least = 100 * min(ours.values()) - best
            texts.append(f"{task.optimizer}: {least:+.1f} points at worst ({shown}; own best {best:.1f})")
    return "; ".join(texts)


def _zero_tuning(arena: Arena, tasks: Sequence[Task]) -> str:
    found = {}
    for task in tasks:
        runs = [run for run in arena.runs.get(task.name, []) if run["start"] == AUTO]
        if runs and task.name in arena.references:
            losses = [task.chance if run["loss"] is None else min(run["loss"], task.chance) for run in runs]
            found[task.name] = float(np.mean(losses)) / arena.references[task.name].best - 1
    if not found:
        return ""
    worst = max(found, key=found.__getitem__)
    within = np.mean([value <= 0.03 for value in found.values()])
    return (
        f"{100 * within:.0f} % of {len(found)} tasks within 3 %; worst {100 * found[worst]:+.0f} % ({worst})"
    )


def _long_accuracy(arena: Arena, tasks: Sequence[Task]) -> str:
    texts = []
    for task in tasks:
        means = {start: arena.accuracy(task, start) for start in task.starts}
        if all(len(each) == len(task.rates) for each in means.values()):
            mean = {start: 100 * float(np.mean(list(each.values()))) for start, each in means.items()}
            best = max(value for start, value in mean.items() if start != OURS)
            ours = mean[OURS]
            texts.append(f"{task.name} {ours:.1f} ({ours - best:+.1f}, {ours - mean['default']:+.1f})")
    return "; ".join(texts)


def _gpu(outcomes: list[Outcome]) -> str:
    """The worst of regret less two standard errors of the difference, and the mean regret."""
    worst, where = -math.inf, ""
    for outcome in outcomes:
        others = rivals(outcome, RACED, {RACED})
        ours = outcome.row(RACED)
        for column in np.flatnonzero(outcome.trainable).tolist():
            rival = min(others, key=lambda row: outcome.means[row, column])
            best = outcome.means[rival, column]
            apart = (outcome.counted[ours, column] - outcome.counted[rival, column]) / best
            error = apart.std(ddof=1) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
            if apart.mean() - 2 * error > worst:
                worst, where = apart.mean() - 2 * error, f"{outcome.task} {outcome.rates[column]:g}"
    return f"{100 * worst:+.1f} % less two errors ({where}); mean regret {_regret(outcomes)}"


def _without_hard(tasks: Sequence[Task]) -> list[Task]:
    return [task for task in tasks if task.name not in HARD]


ROWS = (
    Row("rate robustness, 17 tasks on record, no race", "0.65", "0.50", RECORDED, _robustness(OURS)),
    Row("… raced", "–", "0.42", RECORDED, _robustness(RACED)),
    Row("… without residual-20, tanh-30", "0.34", "0.31", _without_hard(RECORDED), _robustness(OURS)),
    Row("… raced", "–", "0.29", _without_hard(RECORDED), _robustness(RACED)),
    Row("… new, normalized tasks", "–", "0.15", NEW, _robustness(OURS)),
    Row("… raced", "–", "0.10", NEW, _robustness(RACED)),
    Row("mean rank, raced, CPU tasks", "2.1", "1.6", CPU, _of_raced(_rank)),
    Row("mean regret, raced, CPU tasks", "+1.0 %", "-5 %", CPU, _of_raced(_regret)),
    Row("cells > 5 % behind, raced, CPU tasks", "–", "5 %", CPU, _of_raced(_behind)),
    Row("fails where another trains, raced, CPU tasks", "3", "0", CPU, _of_raced(_failures)),
    Row("mean rank, raced, all tasks", "–", "", SHORT, _of_raced(_rank)),
    Row("mean regret, raced, all tasks", "–", "", SHORT, _of_raced(_regret)),
    Row(
        "excess over the best of the grid, Fashion-MNIST, no race", "20–140 % low", "20 % (35 %), mean 10 %",
        NORMALIZED, _cells,
    ),
    Row("ResNet-20 BN: accuracy at every rate", "–", "-1, -3 points", RESNET20, _accuracy_at_every_rate),
    Row("zero tuning, auto rate", "–", "80 % in 3 %, 15 %", SHORT, _zero_tuning),
    Row("long: accuracy (best other, own weights)", "–", ">= 0, >= 1 point", LONG, _long_accuracy),
    Row("GPU set, raced: worst cell", "–", "2 %, below 0", GPU, _of_raced(_gpu)),
)  # fmt: skip
