"""What an experiment of the paper is: pieces of work for every seed, and what their results say together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hessinit.results.reproduction import Findings
from hessinit.results.result import Plain


@dataclass(frozen=True)
class Setting:
    """One experiment on one set of data by one variant of the paper."""

    experiment: str
    data: str
    variant: str
    seeds: tuple[int, ...]
    data_dir: str | None = None  # where the files lie; no number depends on it
    cache: str | None = None  # a folder where a corpus is kept once it has been counted


@dataclass(frozen=True)
class Job:
    """One piece of work: `key` is unique within the setting, and its parameters are plain values."""

    setting: Setting
    key: str
    parameters: Mapping[str, Plain]
    cost: float  # about how many seconds, compared with other jobs; for the bar alone


@dataclass(frozen=True)
class Experiment:
    """How one of the paper's tables is made.

    `data` names the sets it runs on, the paper's first and the embedded one last; `variants` are ways to fill
    in what the paper leaves unsaid, each with a sentence, the default first.
    """

    name: str
    title: str
    data: tuple[str, ...]
    variants: Mapping[str, str]
    seeds: int
    prepare: Callable[[Setting], str]  # look at the data, before any work; gives their source for the record
    configure: Callable[[Setting], dict[str, Plain]]  # all that the numbers depend on, but the seeds
    plan: Callable[[Setting], list[Job]]
    run: Callable[[Job], Plain]  # in a worker, on one thread; always the same numbers
    conclude: Callable[[Setting, Mapping[str, Plain]], Findings]  # from the results of all jobs, by key
