"""The verb `reproduce`: the paper's tables and figures, beside the printed numbers."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from hessinit.errors import ProblemError
from hessinit.jobs.doing import (
    Results,
    WorkerLostError,
    count_cores,
    do_here,
    do_in_processes,
    do_on_executor,
)
from hessinit.jobs.processes import pack
from hessinit.jobs.watching import waited_for, watched
from hessinit.paper.experiment import Experiment, Job, Setting
from hessinit.paper.experiments import (
    check_means,
    check_variant,
    choose_data,
    choose_experiments,
    choose_variant,
    name_of,
)
from hessinit.paper.gathering import write_page, write_pictures
from hessinit.paper.places import at_home
from hessinit.paper.provenance import hardware, versions
from hessinit.paper.store import ResultStore, written
from hessinit.paper.working import Done, PaperWork, usual_torch
from hessinit.problem.validate import check_switches, check_whole
from hessinit.results.reproduction import Findings, Reproduction
from hessinit.results.result import Plain
from hessinit.training.workers import check_workers

FOLDER = "reproduction"
MOST_SEEDS = 100_000


def reproduce(
    *names: str,
    data: str = "paper",
    data_dir: str | os.PathLike[str] | None = None,
    seeds: int | None = None,
    variant: str | None = None,
    folder: str | os.PathLike[str] | None = FOLDER,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: bool = True,
) -> tuple[Reproduction, ...]:
    """Run experiments of the paper by name ("table-4", …, or "all"), and compare with what it prints.

    `data` is "paper" for all sets of images and text that an experiment has, one of them by name, or "digits"
    for what is embedded and needs no download. Files are looked for in `data_dir`; without it, images are
    downloaded once into a cache. `seeds` is how many restarts are made, by default as many as the experiment
    needs; `variant` is another way to fill in what the paper leaves unsaid.

    Every finished piece of work is kept in `folder`, so that the same call goes on after an interruption, and
    gives the same numbers as an undisturbed one. A record of each experiment, its pictures, and the page
    reproduce.html with all that the folder has are written there; None keeps and writes nothing.

    >>> table, = reproduce("table-2", data="digits", seeds=4, folder=None, workers=1)
    >>> print(table.name, table.findings.tables[0].columns)
    table-2-digits ('rtol ≤ 0.5', 'rtol ≤ 1', 'rtol ≤ 1.5')
    """
    check_switches(progress=progress)
    check_workers(workers, executor)
    if seeds is not None:
        check_whole("seeds", seeds, at_least=1)
        if seeds > MOST_SEEDS:
            raise ProblemError(f"seeds={seeds} must be at most {MOST_SEEDS}: no number here needs more.")
    experiments = choose_experiments(names)
    check_variant(experiments, variant)
    chosen = choose_data(experiments, data)
    check_means(experiments)
    where = _check_data_dir(data_dir)
    root = _check_folder(folder)
    studies = []
    for experiment, name in chosen:
        with waited_for(f"Reading {name} for {experiment.name} …", progress):
            read = choose_variant(experiment, variant)
            studies.append(_begin(experiment, name, read, where, seeds, root))
    jobs = [job for study in studies for job in study.jobs]
    missing = [job for study in studies for job in study.missing()]
    by_setting = {study.setting: study for study in studies}
    found: dict[Setting, Reproduction] = {}

    def conclude(study: Study) -> None:
        if study.setting not in found and not study.missing():
            found[study.setting] = study.conclude()

    for study in studies:
        conclude(study)
    with watched(
        "Reproducing", _cost(jobs), _cost(jobs) - _cost(missing), progress, counts=False
    ) as announce:
        try:
            for done in _do(missing, workers, executor):
                study = by_setting[done.job.setting]
                study.store.add(done.job.key, done.value, done.seconds)
                announce(f"{study.name}: {done.job.key}", done.job.cost)
                conclude(study)
        except (KeyboardInterrupt, WorkerLostError) as end:
            left = sum(len(study.missing()) for study in studies)
            how = _how_to_go_on(root, len(jobs) - left, len(jobs))
            if isinstance(end, KeyboardInterrupt):
                raise KeyboardInterrupt(how) from None
            raise ProblemError(f"{end} It {how}") from end.__cause__
    results = tuple(found[study.setting] for study in studies)
    if root is not None:
        with written("the page", root):
            write_page(root)
    return results


@dataclass(frozen=True)
class Study:
    """A setting, its jobs, and where their results go."""

    name: str
    experiment: Experiment
    setting: Setting
    source: str
    jobs: Sequence[Job]
    store: ResultStore
    root: Path | None

    def missing(self) -> list[Job]:
        return [job for job in self.jobs if job.key not in self.store.results]

    def conclude(self) -> Reproduction:
        """What the results say, with the record; written at once, for the other studies may take long."""
        kept = {job.key: self.store.results[job.key] for job in self.jobs}
        values = {key: result.value for key, result in kept.items()}
        reproduction = Reproduction(
            name=self.name,
            experiment=self.experiment.name,
            title=self.experiment.title,
            data=self.setting.data,
            variant=self.setting.variant,
            about_variant=self.experiment.variants[self.setting.variant],
            findings=self._find(values),
            seeds=self.setting.seeds,
            configuration=self.experiment.configure(self.setting),
            source=self.source,
            revision=", ".join(sorted({result.revision for result in kept.values()})),
            versions=versions(),
            hardware=hardware(),
            seconds=round(sum(result.seconds for result in kept.values()), 3),
            results=values,
        )
        if self.root is not None:
            with written("the record", self.root):
                reproduction.save(self.root / f"{self.name}.json")
                write_pictures(reproduction, self.root)
        return reproduction

    def _find(self, values: dict[str, Plain]) -> Findings:
        try:
            with usual_torch():
                return self.experiment.conclude(self.setting, values)
        except ProblemError:
            raise
        except Exception as failure:
            if not self.store.found:
                raise
            raise ProblemError(
                f"nothing can be concluded from the results in {self.store.folder} "
                f"({type(failure).__name__}: {failure}). Was one edited? Delete that one, or all, and they "
                "are made again."
            ) from failure


def _begin(
    experiment: Experiment, data: str, variant: str, data_dir: str | None, seeds: int | None,
    root: Path | None,
) -> Study:  # fmt: skip
    """Look at the data, and at what is there already."""
    cache = None if root is None else str(root / "corpus")
    setting = Setting(
        experiment.name, data, variant, tuple(range(seeds or experiment.seeds)), data_dir, cache
    )
    with usual_torch():  # what is read here is kept for the jobs
        source = experiment.prepare(setting)
    name = name_of(setting)
    store = ResultStore(None if root is None else root / name)
    store.open(
        {
            "experiment": experiment.name,
            "data": data,
            "variant": variant,
            "source": source,
            "configuration": experiment.configure(setting),
            "versions": versions(),
        }
    )
    return Study(name, experiment, setting, source, experiment.plan(setting), store, root)


def _do(jobs: Sequence[Job], workers: int | None, executor: Executor | None) -> Iterator[Done]:
    if not jobs:
        return
    work = PaperWork()
    count = min(len(jobs), workers or count_cores())
    results: Results
    if executor is not None:
        # Nothing of it is in the caller's file, so that none of the workers has to run that again.
        results = do_on_executor(executor, pickle.dumps(work), jobs)
    elif count == 1:
        results = do_here(work, jobs)
    else:
        results = do_in_processes(pack(work), jobs, count)
    with contextlib.closing(results):
        yield from results


def _cost(jobs: Sequence[Job]) -> float:
    return sum(job.cost for job in jobs)


def _check_data_dir(data_dir: object) -> str | None:
    if data_dir is None:
        return None
    if not isinstance(data_dir, (str, os.PathLike)) or not isinstance(os.fspath(data_dir), str):
        raise ProblemError(f"data_dir={data_dir!r} must be the path of a folder, or None.")
    return os.fspath(data_dir)


def _check_folder(folder: object) -> Path | None:
    if folder is None:
        return None
    if not isinstance(folder, (str, os.PathLike)) or not str(folder):
        raise ProblemError(f"folder={folder!r} must be the path of a folder, or None to keep nothing.")
    path = at_home("folder", folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ProblemError(f"folder={str(folder)!r} is a file; pass the name of a folder.") from None
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise ProblemError(
            f"folder={str(folder)!r} cannot be used: {reason}. Pass a folder that can be read and written."
        ) from failure
    return path


def _how_to_go_on(root: Path | None, done: int, total: int) -> str:
    if root is None:
        return (
            f"stopped after {done} of {total} pieces, and none is kept; pass folder= to keep them next time."
        )
    return f"stopped; {done} of {total} pieces are kept in {root}. The same call goes on from there."
