"""From checked arguments to a `Comparison`: look at the model, find out what is missing, make it, collect."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch
from torch import nn

from hessinit._version import __version__
from hessinit.comparing.arguments import check_execution
from hessinit.comparing.behaviour import behaviour
from hessinit.comparing.executing import execute
from hessinit.comparing.experiment import Experiment, Job, fingerprint
from hessinit.comparing.seeds import as_if_alone
from hessinit.comparing.starts import Normal, describe
from hessinit.comparing.store import Key, RunStore, check_folder
from hessinit.comparing.training import NOT_MEASURED, build_model, device_of, first_look
from hessinit.errors import ProblemError
from hessinit.problem.validate import check_switches
from hessinit.results.comparison import Comparison, Run

# The model that is looked at beforehand, whatever seeds are asked for.
SEED_OF_FIRST_LOOK = 0


@dataclass(frozen=True)
class Grid:
    """What is to be run: all starts at all rates with all seeds."""

    starts: tuple[str, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]

    def __iter__(self) -> Iterator[Key]:
        for start in self.starts:
            for rate in self.learning_rates:
                for seed in self.seeds:
                    yield start, rate, seed

    def __len__(self) -> int:
        return len(self.starts) * len(self.learning_rates) * len(self.seeds)


def conduct(
    experiment: Experiment,
    learning_rates: tuple[float, ...],
    seeds: tuple[int, ...],
    *,
    curvature_at_start: bool,
    folder: str | os.PathLike[str] | None,
    workers: int | None,
    executor: Executor | None,
    progress: bool,
    stds: tuple[float, ...] = (),
) -> Comparison:
    """Make every run that is not yet in the folder, and collect them all."""
    check_switches(curvature_at_start=curvature_at_start, progress=progress)
    check_execution(workers, executor)
    check_folder(folder)
    started = time.perf_counter()
    model, seen = _look_at_model(experiment)
    versions = _versions(model)
    store = RunStore(folder)
    # Reading all data for their fingerprint is for nothing without a folder.
    known = fingerprint(experiment, model, seen, curvature_at_start) if folder is not None else None
    seen_to_do = behaviour(experiment) if folder is not None else {}
    remarks = store.open(known, experiment.starts, versions, seen_to_do)
    grid = Grid(tuple(start.name for start in experiment.starts), learning_rates, seeds)
    dependent = tuple(start.name for start in experiment.starts if start.depends_on_rate)
    jobs = _missing(grid, store, dependent if curvature_at_start else (), curvature_at_start)
    remarks += execute(
        experiment, jobs, store, total=len(grid), workers=workers, executor=executor, progress=progress
    )
    return Comparison(
        kind=experiment.kind,
        schemes=grid.starts,
        learning_rates=learning_rates,
        seeds=seeds,
        runs=tuple(_with_its_norms(store, key, grid, dependent) for key in grid),
        steps=experiment.steps,
        batch_size=experiment.data.batch_size,
        optimizer=describe(experiment.optimizer),
        examples=experiment.data.examples,
        warmup=max(start.warmup for start in experiment.starts) or None,
        stds=stds,
        rate_dependent=dependent,
        seconds=time.perf_counter() - started,
        notes=remarks,
        settings={
            "model": type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "loss": describe(experiment.loss),
            "forward": describe(experiment.forward) if experiment.forward is not None else None,
            "curvature_at_start": curvature_at_start,
        },
        versions=versions,
    )


def _look_at_model(experiment: Experiment) -> tuple[nn.Module, tuple[float, float]]:
    """A new model, its first loss and gradient: wrong models, losses and data show before any run."""
    with as_if_alone():
        other = build_model(experiment, SEED_OF_FIRST_LOOK)
        model = build_model(experiment, SEED_OF_FIRST_LOOK)
        shared = {id(parameter) for parameter in other.parameters() if parameter.requires_grad}
        if model is other or any(id(parameter) in shared for parameter in model.parameters()):
            raise ProblemError(
                "build() returned the same model twice, or models that share their weights, and every run "
                "needs its own; create the model inside build, or return copy.deepcopy(model)."
            )
        if device_of(model).type == "meta":
            raise ProblemError(
                "build() puts its weights on the device 'meta', where there are no numbers to train; build "
                "the model on a real one, such as 'cpu'."
            )
        for start in experiment.starts:
            if isinstance(start.how, Normal):
                start.how.check(model)
        return model, first_look(experiment, model, SEED_OF_FIRST_LOOK)


def _missing(grid: Grid, store: RunStore, dependent: Sequence[str], curvature_at_start: bool) -> list[Job]:
    """The runs to make, seed by seed, so that there is something to compare early.

    A start that does not look at the rate is measured at the lowest one that is missing. Where all runs are
    there, but not the one that would have measured, the lowest is made again for its norms alone.
    """
    jobs = []
    for start, rate, seed in sorted(grid, key=lambda key: grid.seeds.index(key[2])):
        is_there = (start, rate, seed) in store.runs
        measures = curvature_at_start and (
            start in dependent or rate == _measures_at(grid, store, start, seed)
        )
        if not is_there or (measures and start not in dependent):
            jobs.append(Job(start, rate, seed, measures))
    return jobs


def _measures_at(grid: Grid, store: RunStore, start: str, seed: int) -> float | None:
    """The rate at which a start that does not look at it is measured; None where that has been done."""
    made = [run for run in store.runs.values() if (run.scheme, run.seed) == (start, seed)]
    if any(run.norms is not None or NOT_MEASURED in run.note or not run.applies for run in made):
        return None
    missing = [rate for rate in grid.learning_rates if (start, rate, seed) not in store.runs]
    return min(missing or grid.learning_rates)


def _with_its_norms(store: RunStore, key: Key, grid: Grid, dependent: Sequence[str]) -> Run:
    """The run, with the norms of a start that does not look at the rate at the lowest rate, and only there.

    An earlier call with other rates may have measured elsewhere; the answer is the same.
    """
    run = store.runs[key]
    start, rate, seed = key
    if start in dependent:
        return run
    if rate != min(grid.learning_rates):
        return replace(run, norms=None)
    measured = (other.norms for other in store.runs.values() if (other.scheme, other.seed) == (start, seed))
    return replace(run, norms=run.norms or next(filter(None, measured), None))


def _versions(model: nn.Module) -> dict[str, str]:
    return {
        "hessinit": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": str(device_of(model)),
    }
