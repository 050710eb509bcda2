"""How the default of `initialize_` was chosen: what was tried, on the development tasks only.

    HESSINIT_DATA=folder python benchmarks/arena/development.py          (half an hour on 2 cores)
    python benchmarks/arena/development.py --show                        the table of the committed record

Every variant is a scheme of its own; its regret is relative to the best plain scheme at the same rate.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import nn  # noqa: E402

from arena.outcomes import count_losses  # noqa: E402
from arena.tasks import CPU, Task  # noqa: E402
from hessinit.init import defaults, scales  # noqa: E402
from hessinit.training.initialize import initialize_  # noqa: E402
from hessinit.results.result import write_text  # noqa: E402
from hessinit.training.compare import compare  # noqa: E402

RECORD = Path(__file__).parents[1] / "results" / "arena-development.json"
PLAIN = ("default", "he", "glorot", "orthogonal", "lsuv", "lsuv+warmup")
Variant = tuple[dict[str, float], dict[str, Any]]  # constants of the defaults, and what `initialize_` is told
VARIANTS: dict[str, Variant] = {
    "lsuv, one gain, κ = 1": ({"KAPPA": 1}, {"scheme": "lsuv", "scaling": "all"}),
    "lsuv, one gain, κ = 4": ({}, {"scheme": "lsuv", "scaling": "all"}),
    "lsuv, last weight, κ = 4": ({}, {"scheme": "lsuv", "scaling": "last"}),
    "lsuv, κ = 4": ({}, {"scheme": "lsuv"}),
    "capped, κ = 1": ({"KAPPA": 1}, {}),
    "capped, κ = 2": ({"KAPPA": 2}, {}),
    "capped, κ = 4 (the default)": ({}, {}),
    "capped, κ = 8": ({"KAPPA": 8}, {}),
    "… never with a small output": ({}, {"scaling": "last or all"}),
    "… outputs of size 0.1": ({"SMALL_OUTPUT": 0.1}, {}),
    "… outputs of size 1": ({"SMALL_OUTPUT": 1.0}, {}),
    "… loss capped at 2 times": ({}, {"max_sharpening": 2.0}),
    "he, κ = 4": ({}, {"scheme": "he"}),
    "orthogonal, κ = 4": ({}, {"scheme": "orthogonal"}),
}
# The normalized task has questions of its own: how sharp, and whether to scale the branches down.
NORMALIZED: dict[str, Variant] = {
    "branches plain, κ = 1/2": ({}, {"residual": "plain"}),
    "branches scaled, κ = 1/2 (the default)": ({}, {}),
    "branches scaled, κ = 1": ({"KAPPA_NORMALIZED": 1}, {}),
    "branches scaled, κ = 2": ({"KAPPA_NORMALIZED": 2}, {}),
    "… sharpened by the last weight": ({}, {"scaling": "last"}),
}


def write_weights_(
    variant: str, normalized: bool, model: nn.Module, loss: Any, batch: Any, lr: float, seed: int
) -> None:
    """A scheme of `compare`; a worker process makes one run at a time, so its constants can be exchanged."""
    constants, options = (NORMALIZED if normalized else VARIANTS)[variant]
    kept = {name: getattr(defaults, name) for name in constants}
    allowed = scales.small_and_large
    if options.get("scaling") == "last or all":
        options, scales.small_and_large = {}, lambda *_: None
    try:
        for name, value in constants.items():
            setattr(defaults, name, value)
        initialize_(model, loss, batch, lr=lr, seed=seed, **options)
    finally:
        scales.small_and_large = allowed
        for name, value in kept.items():
            setattr(defaults, name, value)


def run(task: Task, seeds: int, folder: Path, workers: int) -> dict[str, dict[str, list[float]]]:
    """Final losses by variant and rate."""
    normalized = task.name == "pre-ln"
    schemes: dict[str, Any] = {name: name for name in PLAIN}
    for name in NORMALIZED if normalized else VARIANTS:
        schemes[name] = functools.partial(write_weights_, name, normalized)
    comparison = compare(
        task.build, task.loss, task.data(), schemes=schemes, learning_rates=task.rates, seeds=seeds,
        steps=task.steps, batch_size=task.batch_size, measure_curvature=False,
        folder=folder / task.name, workers=workers,
    )  # fmt: skip
    return {
        scheme: {
            f"{rate:g}": [
                float(f"{one.final_loss:.5g}") if one.finite else 1e9
                for one in comparison.runs_of(scheme, rate)
            ]
            for rate in task.rates
        }
        for scheme in comparison.schemes
    }


def show(record: dict[str, Any], console: Console) -> None:
    """For each variant the mean regret over rates, by task, and the worst cell."""
    chance = {task.name: task.chance for task in CPU}
    for title, variants in (("Plain networks", VARIANTS), ("pre-ln", NORMALIZED)):
        tasks = [name for name in record["tasks"] if (name == "pre-ln") == (title == "pre-ln")]
        if not tasks:
            continue
        table = Table(
            "scheme", *tasks, "mean", "worst", "at", title=f"{title}: loss against the best plain scheme"
        )
        for variant in ("lsuv", *variants):
            cells = {
                (task, rate): _regret(record["tasks"][task], variant, rate, chance[task])
                for task in tasks
                for rate in record["tasks"][task]["lsuv"]
            }
            worst = max(cells, key=cells.__getitem__)
            means = [np.mean([value for (name, _), value in cells.items() if name == task]) for task in tasks]
            whole = [*means, np.mean(list(cells.values())), cells[worst]]
            table.add_row(variant, *(f"{100 * value:+.1f} %" for value in whole), f"{worst[0]}, {worst[1]}")
        console.print(table)
    console.print(f"{record['seeds']} seeds; made with torch {record['torch']}.")


def _regret(losses: dict[str, dict[str, list[float]]], variant: str, rate: str, chance: float) -> float:
    mean = {scheme: float(np.mean(count_losses(by_rate[rate], chance))) for scheme, by_rate in losses.items()}
    best = min(mean[scheme] for scheme in PLAIN)
    return mean[variant] / best - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=Path("build/arena-development"))
    parser.add_argument("--show", action="store_true")
    arguments = parser.parse_args()
    if not arguments.show:
        tasks: dict[str, Any] = {}
        for task in (task for task in CPU if task.development):
            tasks[task.name] = run(task, arguments.seeds, arguments.folder, arguments.workers)
            record = {"torch": torch.__version__, "seeds": arguments.seeds, "tasks": tasks}
            write_text(RECORD, json.dumps(record) + "\n")
    show(json.loads(RECORD.read_text()), Console(width=150, highlight=False))


if __name__ == "__main__":
    main()
