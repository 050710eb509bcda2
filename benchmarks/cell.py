"""One cell of the race: one contestant on one problem, in a process of its own, under a time cap."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from contestants import CONTESTANTS
from problems import build_problem
from settings import NotOfferedError
from timing import PeakMemory, read_status, time_gradients, time_interleaved

# Forked from a server that has imported torch and run nothing: a fresh process in milliseconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "scipy.sparse.linalg", "problems"])


@dataclass(frozen=True)
class Options:
    """`repeat=False` takes one call only, where the answer matters and not the time."""

    threads: int = 2
    cap: float = 40.0
    repeat: bool = True


def _compete(
    connection: Connection, problem_name: str, curvature: str, contestant: str, options: Options
) -> None:
    sys.stdout = io.StringIO()  # what a peer prints is no result
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    try:
        _measure(connection, problem_name, curvature, contestant, options)
    except (ImportError, NotOfferedError) as error:
        connection.send({"status": "missing", "message": str(error)})
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        missing = isinstance(error, AttributeError) and "module 'hessinit'" in message
        status = "missing" if missing else "error"
        connection.send({"status": status, "message": message[:300]})


def _measure(connection: Connection, name: str, curvature: str, contestant: str, options: Options) -> None:
    prepare = CONTESTANTS[contestant]
    # Two copies: gradients move BatchNorm's statistics, and contestants leave hooks and modes behind.
    problem, yardstick = build_problem(name), build_problem(name)
    # The tiny problem loads what is loaded lazily, so that neither clock nor memory charge for it.
    list(prepare(build_problem("tiny-tanh" if curvature == "hessian" else "tiny-relu"), curvature)())
    time_gradients(yardstick)
    gradients = time_gradients(yardstick)
    run = prepare(problem, curvature)
    connection.send({"gradient_seconds": gradients})
    norms = {}
    with PeakMemory() as memory:
        connection.send({"resident": memory.before})
        start = time.perf_counter()
        for layer, norm in run():
            norms[layer] = norm
            connection.send({"layer": layer, "norm": norm, "elapsed": time.perf_counter() - start})
        first = time.perf_counter() - start
    answer = {"norms": norms, "peak_mib": memory.mebibytes}
    connection.send({"answered": True, **answer, **_times([first], gradients)})
    seconds = [first]
    if options.repeat:
        seconds, more = time_interleaved(yardstick, lambda: list(run()), first)
        gradients += more
    connection.send({"status": "ok", **answer, **_times(seconds, gradients)})


def _times(seconds: list[float], gradients: list[float]) -> dict:
    return {
        "seconds": [round(second, 7) for second in seconds],
        "gradient_seconds": [round(second, 7) for second in gradients],
        "gradients": min(seconds) / min(gradients),
    }


def run_cell(problem: str, curvature: str, contestant: str, options: Options) -> dict:
    """The cell's record. Past the cap it is stopped, and what it had done by then is what is recorded."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_compete, args=(theirs, problem, curvature, contestant, options))
    process.daemon = True
    process.start()
    theirs.close()
    cap = options.cap
    record: dict = {"norms": {}, "load": round(os.getloadavg()[0], 2)}
    deadline = time.perf_counter() + cap + 30  # set-up may not hang either
    while "status" not in record:
        try:
            if not ours.poll(max(0.0, deadline - time.perf_counter())):
                record |= _stop(process, record, cap)
                break
            message = ours.recv()
        except EOFError:
            process.join()
            record |= {"status": "error", "message": f"the process ended with exit code {process.exitcode}"}
            break
        if "layer" in message:
            record["norms"][message["layer"]] = message["norm"]
        elif "resident" in message:
            record["resident"], deadline = message["resident"], time.perf_counter() + cap
        else:
            record |= message
    process.join()
    for private in ("resident", "answered"):
        record.pop(private, None)
    return record


def _stop(process: multiprocessing.process.BaseProcess, record: dict, cap: float) -> dict:
    """Stops the process; a capped cell's gradients and memory are lower bounds."""
    peak = read_status("VmHWM", process.pid)
    process.kill()
    if "answered" in record:  # The first call was in time; only the repetitions were not.
        return {"status": "ok"}
    if "resident" not in record:
        return {"status": "capped", "message": f"not ready {cap + 30:.0f} s after its start"}
    return {
        "status": "capped",
        "seconds": [cap],
        "gradients": cap / min(record["gradient_seconds"]),
        "peak_mib": peak - record["resident"],
        "message": f"{len(record['norms'])} layers done in {cap:.0f} s",
    }
