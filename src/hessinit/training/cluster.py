"""Run jobs on a Dask cluster; the user's own files travel with the work."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import pickle
import pickletools
import sys
import time
import uuid
import warnings
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from pathlib import Path
from typing import Any

from hessinit.errors import ProblemError
from hessinit.measurement.facts import SOFTWARE
from hessinit.training.workers import Job, Results, Work, WorkerLostError, pack, run_packed

PATIENCE = 60.0  # seconds without any worker; a nanny brings one back within ten
CONTINUE = (
    "Finished runs are kept in the folder, if one was given; the same call or command continues."
)
VERSIONS = f"hessinit {SOFTWARE['hessinit']}, torch {SOFTWARE['torch'].partition('+')[0]}"  # not +cpu, +cu126
INSTALLED = {"site-packages", "dist-packages", Path(pickle.__file__).parent.name}
_sent: set[str] = (
    set()
)  # what this process has sent, and need not import again if it is a worker, too


def run_on_cluster(work: Work, jobs: Sequence[Job], executor: Any) -> Results:
    """Like `run_jobs`, on the executor of a Dask client.

    A run whose worker dies is made on another.
    """
    import cloudpickle  # comes with Dask; also sends lambdas, and what a main script defines
    from distributed import KilledWorker

    executor = executor.get_executor() if hasattr(executor, "get_executor") else executor
    client = executor._client  # its futures, unlike the executor's, can be arguments of other tasks
    packed = pack(work, cloudpickle.dumps)
    packed = pickle.dumps(SentFiles(_find_files(packed))) + packed
    futures: dict[Future[Any], Job] = {}
    try:
        # A worker without hessinit would end itself at its first task.
        for answer in client.run(importlib.import_module, __name__, on_error="return").values():
            if isinstance(answer, ImportError):
                raise answer
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sending large graph")  # it is sent once
            # A task that returns it, not scattered data: these are lost with the worker that holds
            # them.
            held = client.submit(bytes, packed, pure=False)
        futures.update({executor.submit(run_packed, held, job, pure=False): job for job in jobs})
        pending = set(futures)
        seen = time.monotonic()
        while pending:
            done, pending = wait(pending, 1.0, FIRST_COMPLETED)
            for future in done:
                yield futures[future], future.result()
            with contextlib.suppress(
                OSError
            ):  # where the scheduler is gone, the client cancels all futures
                seen = time.monotonic() if done or client.nthreads() else seen
            if time.monotonic() - seen > PATIENCE:
                raise WorkerLostError(
                    f"the Dask scheduler has had no worker for {PATIENCE:g} s. Start some with `dask worker "
                    f"{client.scheduler.address}`. {CONTINUE}"
                )
    except (CancelledError, KilledWorker) as failure:
        why = "the Dask scheduler was lost, or its tasks were cancelled"
        if isinstance(failure, KilledWorker):
            why = "a run was begun again and again, and every worker died; it may need more memory"
        raise WorkerLostError(f"{why}. {CONTINUE}") from failure
    except Exception as failure:
        for link in (failure, failure.__cause__, failure.__context__):
            if isinstance(link, ModuleNotFoundError):
                raise ProblemError(
                    f"the Dask cluster has no module {link.name!r}. Install there what is installed here; "
                    "modules of your own are sent if they are Python files imported before the first run."
                ) from failure
        raise
    finally:
        for future in futures:
            future.cancel()


def _find_files(packed: bytes) -> dict[str, tuple[str, bytes]]:
    """Path and source of the user's modules that a pickle names, and of all loaded from the same folders."""
    strings = {value for _, value, _ in pickletools.genops(packed) if isinstance(value, str)}
    folders = {_folder_of(name) for name in strings & sys.modules.keys()} - {None}
    names = [
        name for name in list(sys.modules) if name != "__main__" and _folder_of(name) in folders
    ]
    paths = [
        (name, path) for name in names if (path := _path_of(sys.modules[name])).suffix == ".py"
    ]
    return {name: (str(path), path.read_bytes() if path.exists() else b"") for name, path in paths}


def _path_of(module: Any) -> Path:
    inside = list(getattr(module, "__path__", ()))  # a package need not have a file
    return (
        Path(inside[0], "__init__.py") if inside else Path(getattr(module, "__file__", None) or "")
    )


def _folder_of(module: str) -> Path | None:
    """Where the user's module, or the package that it is in, was imported from; None if it is installed."""
    path = _path_of(sys.modules.get(name := module.partition(".")[0]))
    installed = (
        INSTALLED & set(path.parts) or name in ("hessinit", "torch") or not path.is_absolute()
    )
    return None if installed else path.parents[path.name == "__init__.py"]


class SentFiles(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):  # type: ignore[misc]
    """Imports modules from text, once it is unpickled.

    Their `__file__` is the sender's, for tracebacks.
    """

    def __init__(self, files: dict[str, tuple[str, bytes]]) -> None:
        # The name makes the bytes new: equal ones could mean files that have been changed since.
        self.files = files
        self.versions = VERSIONS
        self.name = uuid.uuid4().hex
        _sent.add(self.name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.versions != VERSIONS:
            raise ProblemError(
                f"a Dask worker has {VERSIONS}, and this process {self.versions}: their numbers may "
                "differ. Install the same versions."
            )
        if self.name not in _sent:
            before = [finder for finder in sys.meta_path if isinstance(finder, SentFiles)]
            for name in {name for finder in (*before, self) for name in finder.files}:
                sys.modules.pop(name, None)
            sys.meta_path[:] = [self, *(finder for finder in sys.meta_path if finder not in before)]

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname in self.files else None

    def get_filename(self, fullname: str) -> str:
        return self.files[fullname][0]

    def get_data(self, path: Any) -> bytes:
        return next(source for file, source in self.files.values() if file == path)
