"""Do one job, the same way in every process."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hessinit.paper.experiment import Job
from hessinit.paper.experiments import EXPERIMENTS
from hessinit.results.result import Plain
from hessinit.training.seeds import reproducible

# What torch is set to belongs to the whole process: threads of an executor take turns.
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True)
class Done:
    """A finished job."""

    job: Job
    value: Plain
    seconds: float


@dataclass(frozen=True)
class PaperWork:
    """All jobs of all experiments: a job knows its own."""

    def begin(self) -> None:
        """Nothing to set up: a job loads its data, and keeps them for the next one."""

    def do(self, job: Job) -> Done:
        with _ONE_AT_A_TIME, reproducible(), usual_torch(), warnings.catch_warnings():
            started = time.perf_counter()
            warnings.simplefilter("ignore")  # the results say what did not converge
            value = EXPERIMENTS[job.setting.experiment].run(job)
        return Done(job, value, round(time.perf_counter() - started, 3))


@contextlib.contextmanager
def usual_torch() -> Iterator[None]:
    """The defaults of a new process, whatever the caller has set in this one."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)
