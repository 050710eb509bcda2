"""The verb `reproduce`: run experiments of the paper by name and compare them with its printed numbers."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import subprocess
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hessinit._version import __version__
from hessinit.errors import ProblemError, choose
from hessinit.paper.datasets import load_images
from hessinit.problem.validate import check_switches, check_whole
from hessinit.progress import report_progress
from hessinit.results.reproduction import Findings, Reproduction
from hessinit.results.result import Plain, presenter, replacing, to_plain, write_text
from hessinit.training.data import reproducible
from hessinit.training.job_folder import JobFolder
from hessinit.training.workers import Job, check_workers

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
    """One experiment on one set of data in one variant."""

    experiment: str
    data: str
    variant: str
    seeds: tuple[int, ...]
    data_dir: str | None = None  # where the files lie; no number depends on it

    @property
    def name(self) -> str:
        """The name of its files.

        >>> PaperSetting("table-4", "mnist", "one-hidden", (0,)).name
        'table-4-mnist-one-hidden'
        """
        is_default = self.variant == next(iter(find_experiment(self.experiment).variants))
        return f"{self.experiment}-{self.data}{'' if is_default else f'-{self.variant}'}"


@dataclass(frozen=True)
class Variant:
    """A way to fill in what the paper leaves unsaid: in words, and the network as a record describes it."""

    about: str
    network: Mapping[str, Plain] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """How one of the paper's tables is made: jobs for every seed, and findings from their results.

    `data` names the data sets it runs on, the paper's first; the first of `variants` is the
    default. `configure` returns everything that the numbers depend on, except the seeds; `plan`
    jobs with unique keys and plain parameters; `run` the result of one, the same wherever it is
    run; `conclude` the findings.
    """

    name: str
    title: str
    data: tuple[str, ...]
    variants: Mapping[str, Variant]
    seeds: int

    def prepare(self, setting: PaperSetting) -> str:
        """Read the data, so that a fault in them is told before any work; returns their source."""
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
    """The experiment of that name.

    >>> find_experiment("table-4").data
    ('mnist', 'fashion-mnist', 'digits')
    """
    module = importlib.import_module(f"hessinit.paper.{MODULES[name]}")
    return next(each for each in module.EXPERIMENTS if each.name == name)


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
    """Run experiments of the paper by name ("table-4", …, or "all"), and compare with what it prints.

    `data` is "paper" for all sets of images and text that an experiment has, one of them by name,
    or "digits" for the embedded images ("all" then leaves out word2vec, which needs a text). Files
    are looked for in `data_dir`; without it, images are downloaded once into a cache. `seeds` is
    the number of restarts; `variant` is another way to fill in what the paper leaves unsaid.

    Every finished job is kept in `folder`, where the same call continues after an interruption, to
    the same numbers, and where records, figures and a page, reproduce.html, are written; None keeps
    nothing.

    >>> table, = reproduce("table-2", data="digits", seeds=4, folder=None, workers=1)
    >>> print(table.name, table.findings.tables[0].columns)
    table-2-digits ('rtol ≤ 0.5', 'rtol ≤ 1', 'rtol ≤ 1.5')
    """
    check_switches(progress=progress)
    check_workers(workers, executor)
    if seeds is not None:
        check_whole("seeds", seeds, at_least=1)
    root = (
        None if folder is None else Path(folder).expanduser()
    )  # a shell leaves --folder=~/x as it is
    studies = []
    for experiment, name in choose_experiments(names, data, variant):
        setting = PaperSetting(
            experiment.name,
            name,
            variant or next(iter(experiment.variants)),
            tuple(range(seeds or experiment.seeds)),
            None if data_dir is None else str(data_dir),
        )
        label = f"Reading {name} for {experiment.name} …"
        with report_progress(progress, label), usual_torch():
            source = experiment.prepare(setting)  # what is read here is kept for the jobs
        about: dict[str, Any] = {
            "experiment": experiment.name,
            "data": name,
            "variant": setting.variant,
            "source": source,
            "configuration": experiment.configure(setting),
            "versions": versions(),  # results of others may differ in their last digits, and are not mixed
        }
        store = JobFolder(
            None if root is None else root / setting.name,
            workers=workers,
            executor=executor,
            progress=progress,
        )
        store.open(about)
        studies.append((experiment, setting, about, store))
    found = []
    for experiment, setting, about, store in studies:
        jobs = [Job(job.key, (setting, job.parameters)) for job in experiment.plan(setting)]
        kept = store.run(run_job, jobs, label=setting.name)
        values = {key: result["value"] for key, result in kept.items()}
        reproduction = Reproduction(
            name=setting.name,
            title=experiment.title,
            seeds=setting.seeds,
            hardware=hardware(),
            **about,
            about_variant=experiment.variants[setting.variant].about,
            findings=experiment.conclude(setting, values),
            revision=", ".join(sorted({str(result["revision"]) for result in kept.values()})),
            seconds=round(sum(float(result["seconds"]) for result in kept.values()), 3),
            results=values,
        )
        if root is not None:
            reproduction.save(root / f"{setting.name}.json")
            rest = setting.name.removeprefix(experiment.name)
            for figure in reproduction.findings.figures:
                (axes,) = presenter().draw(reproduction, figure.name)
                with replacing(
                    root / f"{figure.name}{rest}.png"
                ) as temporary:  # such as figure-1-mnist.png
                    axes.figure.savefig(temporary, format="png", dpi=200)
            write_text(root / "reproduce.html", presenter().to_page(load_records(root)))
        found.append(reproduction)
    return tuple(found)


def choose_experiments(
    names: Sequence[str], data: str, variant: str | None
) -> list[tuple[Experiment, str]]:
    """The experiments meant, each once, in the paper's order, with each set of data they are to run on."""
    if not names:
        raise ProblemError(f"nothing to reproduce was named; name some of {', '.join(NAMES)}.")
    for name in names:
        choose("name", name, NAMES)
    wanted = {FIGURES.get(name, name) for name in names}
    experiments = [find_experiment(name) for name in MODULES if name in wanted or "all" in wanted]
    known = dict.fromkeys(name for each in experiments for name in ("paper", "digits", *each.data))
    choose("data", data, list(known))
    for each in experiments:
        if variant is not None:
            choose(f"{each.name}: variant", variant, list(each.variants))
        if data == "digits" not in each.data and each.name in wanted:
            raise ProblemError(
                f"{each.name} does not run on the embedded digits. Pass data={each.data[0]!r}, and as "
                "data_dir the folder with a Wikipedia text."
            )
    papers = [(each, name) for each in experiments for name in each.data if name != "digits"]
    return (
        papers if data == "paper" else [(each, data) for each in experiments if data in each.data]
    )


def run_job(job: Job) -> Plain:
    """The result of one job with its time and the revision of the code; the same numbers in every process."""
    setting, parameters = job.parameters
    with reproducible(), usual_torch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the results say what did not converge
        started = time.perf_counter()
        value = find_experiment(setting.experiment).run(setting, parameters)
        seconds = round(time.perf_counter() - started, 3)
    return {"value": value, "seconds": seconds, "revision": revision()}


@contextlib.contextmanager
def usual_torch() -> Iterator[None]:
    """The defaults of a new process, whatever the caller has set in this one."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def load_records(folder: str | os.PathLike[str]) -> list[Reproduction]:
    """All records in a folder, by name; other files are ignored."""
    found = []
    for path in sorted(Path(folder).glob("*.json")):
        with contextlib.suppress(ValueError, OSError, RecursionError):
            found.append(Reproduction.load(path))
    return found


def round_numbers(value: Any) -> Plain:
    """Plain data with seven significant digits, which is what float32 carries.

    >>> round_numbers({"loss": [0.123456789, float("nan")], "steps": 12345678})
    {'loss': [0.1234568, 'nan'], 'steps': 12345678}
    """
    if isinstance(value, dict):
        return {key: round_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [round_numbers(item) for item in value]
    return to_plain(float(f"{value:.7g}") if isinstance(value, float) else value)


def versions() -> dict[str, str]:
    packages = [name for name in ("torch", "numpy", "scipy") if importlib.util.find_spec(name)]
    found = {name: metadata.version(name) for name in packages}
    return {"hessinit": __version__, **found, "python": platform.python_version()}


def hardware() -> dict[str, str]:
    """The machine, in words; nothing that names it."""
    kind = platform.machine()
    return {
        "processor": platform.processor() or kind,
        "cores": str(os.cpu_count() or "unknown"),
        "system": f"{platform.system()} {kind}",
    }


@functools.cache
def revision() -> str:
    """The commit of a checkout, with "-dirty" where files differ from it; else the version."""
    root = Path(__file__).parents[3]
    if (root / ".git").exists():
        command = [
            "git",
            "-C",
            str(root),
            "describe",
            "--always",
            "--dirty",
            "--abbrev=12",
            "--exclude=*",
        ]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            return found.stdout.strip()
    return f"hessinit {__version__}"
