"""Do jobs on a Dask cluster; functions and classes of the user's files travel with the work."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import pickle
import sys
import time
import warnings
from collections import ChainMap
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
from distributed import KilledWorker

from hessinit.errors import ProblemError
from hessinit.training.jobs import Job, Results, Work, WorkerLostError, pack, run_packed

PATIENCE = 60.0  # seconds without any worker; a nanny brings one back within ten
CONTINUE = (
    "Finished runs are kept in the folder, if one was given; the same call or command continues."
)
INSTALLED = {"site-packages", "dist-packages", Path(pickle.__file__).parent.name}


def run_on_cluster(work: Work, jobs: Sequence[Job], executor: Any) -> Results:
    """Yield (job, result) as they finish, on the executor of a Dask client.

    A run whose worker dies is made on another.
    """
    executor = executor.get_executor() if hasattr(executor, "get_executor") else executor
    client = executor._client  # its futures, unlike the executor's, can be arguments of other tasks
    packed = pack(work, dump_by_value)
    futures: dict[Future[Any], Job] = {}
    try:
        # A worker without hessinit would end itself at its first task.
        answers = client.run(importlib.import_module, __name__, on_error="return")
        for answer in answers.values():
            if isinstance(answer, ImportError):
                raise answer
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sending large graph")  # it is sent once
            # The result of a task, not scattered data, which is lost with the worker that holds it.
            sent = client.submit(bytes, packed, pure=False)
        for job in jobs:
            futures[executor.submit(run_packed, sent, job, pure=False)] = job
        yield from _as_they_finish(futures, client)
    except (CancelledError, KilledWorker) as failure:
        reason = "the Dask scheduler was lost, or its tasks were cancelled"
        if isinstance(failure, KilledWorker):
            reason = (
                "a run was begun again and again, and every worker died; it may need more memory"
            )
        raise WorkerLostError(f"{reason}. {CONTINUE}") from failure
    except Exception as failure:
        for link in (failure, failure.__cause__, failure.__context__):
            if isinstance(link, ModuleNotFoundError):
                raise ProblemError(
                    f"the Dask cluster has no module {link.name!r}. Install there what is "
                    "installed here; what your functions use of your own files is sent with them, "
                    "if it is imported at the top of a file."
                ) from failure
        raise
    finally:
        for future in futures:
            future.cancel()


def _as_they_finish(futures: dict[Future[Any], Job], client: Any) -> Results:
    pending = set(futures)
    last_sign = time.monotonic()
    while pending:
        done, pending = wait(pending, 1.0, FIRST_COMPLETED)
        for future in done:
            yield futures[future], future.result()
        # If the scheduler is gone, the client cancels all futures.
        with contextlib.suppress(OSError):
            if done or client.nthreads():
                last_sign = time.monotonic()
        if time.monotonic() - last_sign > PATIENCE:
            raise WorkerLostError(
                f"the Dask scheduler has had no worker for {PATIENCE:g} s. Start some with `dask "
                f"worker {client.scheduler.address}`. {CONTINUE}"
            )


def dump_by_value(work: Any) -> bytes:
    """Pickle the work with the user's functions and classes: workers need not have their files."""
    packages = {name.partition(".")[0] for name in list(sys.modules)} - {"__main__", "hessinit"}
    modules = [sys.modules[name] for name in packages if _is_own_file(sys.modules.get(name))]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        stream = io.BytesIO()
        _ByValue(stream).dump(work)
        return stream.getvalue()
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own_file(module: Any) -> bool:
    """Whether the module or package is a file of the user that is not installed."""
    paths = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    files = [Path(path) for path in paths if path]
    return any(file.is_absolute() and not INSTALLED & set(file.parts) for file in files)


def _reduce_cached(cached: Any) -> Any:
    """The reduction of a function in `functools.cache`, which pickle would take from its file."""
    module = cached.__module__.partition(".")[0]
    if module not in {"__main__", *cloudpickle.list_registry_pickle_by_value()}:
        return cached.__qualname__
    return _cache, (cached.__wrapped__, cached.cache_parameters())


def _cache(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


class _ByValue(cloudpickle.CloudPickler):  # type: ignore[misc]
    dispatch_table: ClassVar = ChainMap(
        {type(functools.cache(len)): _reduce_cached}, cloudpickle.CloudPickler.dispatch_table
    )
