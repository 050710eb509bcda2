"""`reproduce`: run experiments of the paper by name and compare them with its printed numbers."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hessinit import ProblemError
from hessinit.jobs import Job, JobFolder, report_progress, reproducible
from hessinit.reporting import write_page
from hessinit_paper.checks import check_choice, check_count
from hessinit_paper.images import load_images
from hessinit_paper.provenance import hardware, revision, versions
from hessinit_paper.reproduction import Findings, Plain, Reproduction

# The module of each experiment, in the paper's order; imported only when it is run.
MODULES = {
    "table-1": "table_1",
    "table-2": "tables_2_3",
    "table-3": "tables_2_3",
    "table-4": "tables_4_5",
    "table-5": "tables_4_5",
    "word2vec": "word2vec",
}
# The figures are drawn from the results of the tables.
FIGURES = {"figure-1": "table-4", "figure-2": "table-5"}
NAMES = [*MODULES, *FIGURES, "all"]


@dataclass(frozen=True)
class PaperSetting:
    """One experiment on one data set in one variant."""

    experiment: str
    data: str
    variant: str
    seeds: tuple[int, ...]
    data_dir: str | None = None  # where the files are; no number depends on it

    @property
    def name(self) -> str:
        """The name of its files.

        >>> PaperSetting("table-4", "mnist", "one-hidden", (0,)).name
        'table-4-mnist-one-hidden'
        """
        name = f"{self.experiment}-{self.data}"
        is_default = self.variant == find_experiment(self.experiment).default_variant
        return name if is_default else f"{name}-{self.variant}"


@dataclass(frozen=True)
class Variant:
    """A choice of what the paper leaves unsaid, in words, and the network as recorded."""

    about: str
    network: Mapping[str, Plain] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """How one of the paper's tables is made: jobs for every seed, and findings from their results.

    `data` names the data sets it runs on, the paper's first; the first of `variants` is the
    default. `configure` returns everything that the numbers depend on, except the seeds; `plan`
    returns jobs with unique keys and plain parameters; `run` the result of one job, the same
    wherever it runs; `conclude` the findings.
    """

    name: str
    title: str
    data: tuple[str, ...]
    variants: Mapping[str, Variant]
    seeds: int

    @property
    def default_variant(self) -> str:
        return next(iter(self.variants))

    def prepare(self, setting: PaperSetting) -> str:
        """Read the data, so that a fault in them is found before any work; return their source."""
        return load_images(setting.data, setting.data_dir).source

    @abstractmethod
    def configure(self, setting: PaperSetting) -> dict[str, Plain]: ...
    @abstractmethod
    def plan(self, setting: PaperSetting) -> list[Job]: ...
    @abstractmethod
    def run(self, setting: PaperSetting, parameters: Mapping[str, Plain]) -> Plain: ...
    @abstractmethod
    def conclude(self, setting: PaperSetting, results: Mapping[str, Plain]) -> Findings: ...


def find_experiment(name: str) -> Experiment:
    """Return the experiment of that name.

    >>> find_experiment("table-4").data
    ('mnist', 'fashion-mnist', 'digits')
    """
    module = importlib.import_module(f"hessinit_paper.{MODULES[name]}")
    return next(experiment for experiment in module.EXPERIMENTS if experiment.name == name)


def reproduce(
    *names: str,
    data: str = "paper",
    data_dir: str | os.PathLike[str] | None = None,
    seeds: int | None = None,
    variant: str | None = None,
    folder: str | os.PathLike[str] | None = "reproduction",
    workers: int | None = None,
    executor: Executor | None = None,
    progress: bool = True,
) -> tuple[Reproduction, ...]:
    """Run experiments of the paper by name ("table-4", …, or "all") beside its printed numbers.

    `data` is "paper" for all images and text that an experiment has, the name of one data set, or
    "digits" for the embedded images ("all" then leaves out word2vec, which needs a text). Files are
    looked for in `data_dir`; without it, images are downloaded once into a cache. `seeds` is the
    number of restarts; `variant` is another choice of what the paper leaves unsaid.

    Every finished job is kept in `folder`, where the same call continues after an interruption, to
    the same numbers, and where records, figures and a page, reproduce.html, are written; None keeps
    nothing.

    >>> table, = reproduce("table-2", data="digits", seeds=4, folder=None, workers=1)
    >>> print(table.name, table.findings.tables[0].columns)
    table-2-digits ('rtol ≤ 0.5', 'rtol ≤ 1', 'rtol ≤ 1.5')
    """
    if seeds is not None:
        check_count("seeds", seeds)
    root = None if folder is None else Path(folder).expanduser()  # as in --folder=~/paper
    studies = []
    for experiment, data_set in choose_experiments(names, data, variant):
        setting = PaperSetting(
            experiment.name,
            data_set,
            variant or experiment.default_variant,
            tuple(range(seeds or experiment.seeds)),
            None if data_dir is None else str(data_dir),
        )
        results = JobFolder(
            None if root is None else root / setting.name,
            workers=workers,
            executor=executor,
            progress=progress,
        )
        label = f"Reading {data_set} for {experiment.name} …"
        with report_progress(progress, label), usual_torch():
            source = experiment.prepare(setting)  # what is read here is reused by the jobs
        study = Study(experiment, setting, source, results)
        results.open(study.identity)
        studies.append(study)
    reproductions = []
    for study in studies:
        reproduction = study.run()
        if root is not None:
            _write(reproduction, root)
        reproductions.append(reproduction)
    return tuple(reproductions)


@dataclass(frozen=True)
class Study:
    """An experiment on one data set, and the folder that keeps the results of its jobs."""

    experiment: Experiment
    setting: PaperSetting
    source: str
    folder: JobFolder

    @property
    def identity(self) -> dict[str, Plain]:
        """What all results in one folder must share; other versions differ in their last digits."""
        return {
            "experiment": self.experiment.name,
            "data": self.setting.data,
            "variant": self.setting.variant,
            "source": self.source,
            "configuration": self.experiment.configure(self.setting),
            "versions": versions(),
        }

    def run(self) -> Reproduction:
        """Run the jobs that the folder does not have, and conclude from all of them."""
        experiment = self.experiment
        setting = self.setting
        jobs = [Job(job.key, (setting, job.parameters)) for job in experiment.plan(setting)]
        results = self.folder.run(run_job, jobs, label=setting.name)
        values = {key: result["value"] for key, result in results.items()}
        return Reproduction(
            name=setting.name,
            experiment=experiment.name,
            title=experiment.title,
            data=setting.data,
            variant=setting.variant,
            about_variant=experiment.variants[setting.variant].about,
            findings=experiment.conclude(setting, values),
            seeds=setting.seeds,
            configuration=experiment.configure(setting),
            source=self.source,
            revision=", ".join(sorted({str(result["revision"]) for result in results.values()})),
            versions=versions(),
            hardware=hardware(),
            seconds=round(sum(float(result["seconds"]) for result in results.values()), 3),
            results=values,
        )


def run_job(job: Job) -> Plain:
    """Return the result of one job with its time and the revision of the code."""
    setting, parameters = job.parameters
    with reproducible(), usual_torch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the results say what did not converge
        started = time.perf_counter()
        value = find_experiment(setting.experiment).run(setting, parameters)
        seconds = round(time.perf_counter() - started, 3)
    return {"value": value, "seconds": seconds, "revision": revision()}


@contextlib.contextmanager
def usual_torch() -> Iterator[None]:
    """Give torch the defaults of a new process, whatever the caller has set in this one."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def choose_experiments(
    names: Sequence[str], data: str, variant: str | None
) -> list[tuple[Experiment, str]]:
    """Return the named experiments, once and in the paper's order, with each of their data sets."""
    if not names:
        raise ProblemError(f"nothing to reproduce was named; name some of {', '.join(NAMES)}.")
    for name in names:
        check_choice("name", name, NAMES)
    tables = {FIGURES.get(name, name) for name in names}
    experiments = [find_experiment(name) for name in MODULES if tables & {name, "all"}]
    data_sets = chain.from_iterable(experiment.data for experiment in experiments)
    check_choice("data", data, list(dict.fromkeys(["paper", "digits", *data_sets])))
    pairs = []
    for experiment in experiments:
        if variant is not None:
            check_choice(f"{experiment.name}: variant", variant, list(experiment.variants))
        if data == "digits" not in experiment.data and experiment.name in tables:
            raise ProblemError(
                f"{experiment.name} does not run on the embedded digits. Pass "
                f"data={experiment.data[0]!r}, and as data_dir the folder with a Wikipedia text."
            )
        published = [name for name in experiment.data if name != "digits"]
        chosen = published if data == "paper" else {data} & {*experiment.data}
        pairs += [(experiment, name) for name in chosen]
    return pairs


def load_records(folder: str | os.PathLike[str]) -> list[Reproduction]:
    """Return all records in a folder, by name; other files are ignored."""
    records = []
    for path in sorted(Path(folder).glob("*.json")):
        with contextlib.suppress(ValueError, OSError, RecursionError):
            records.append(Reproduction.load(path))
    return records


def round_numbers(value: Any) -> Plain:
    """Return plain data with seven significant digits, the precision of float32.

    >>> round_numbers({"loss": [0.123456789, float("nan")], "steps": 12345678})
    {'loss': [0.1234568, 'nan'], 'steps': 12345678}
    """
    if isinstance(value, Mapping):
        return {key: round_numbers(number) for key, number in value.items()}
    if isinstance(value, list | tuple):
        return [round_numbers(number) for number in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else str(value)


def _write(reproduction: Reproduction, root: Path) -> None:
    """Write the record, its figures, and the page of all records in the folder."""
    reproduction.save(root / f"{reproduction.name}.json")
    suffix = reproduction.name.removeprefix(reproduction.experiment)
    for figure in reproduction.findings.figures:
        path = root / f"{figure.name}{suffix}.png"  # such as figure-1-mnist.png
        drawn: Any = reproduction.plot(figure.name).figure
        unfinished = path.with_suffix(".png.tmp")
        drawn.savefig(unfinished, format="png", dpi=200)
        unfinished.replace(path)
    write_page(Reproduction.describe_several(load_records(root)), root / "reproduce.html")
