"""Clock and memory of one call, in the process it is called in."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable

import torch
from problems import Problem

REPETITIONS = 15  # at most
PATIENCE_SECONDS = 3.0  # repeat until this is spent, but at least LEAST times where one call is short
LEAST = 3
LONG_CALL_SECONDS = 6.0  # a call this long is not repeated


def time_gradient(problem: Problem) -> float:
    """Seconds of one gradient: forward and backward of the batch, to all parameters. The unit of the race."""
    parameters = list(problem.model.parameters())

    def gradient() -> None:
        value = problem.loss(problem.model(problem.inputs), problem.targets)
        torch.autograd.grad(value, parameters)

    return time_call(gradient)


def time_gradients(problem: Problem, seconds: float = 0.5, least: int = 3) -> list[float]:
    """At least so many, and as many as fit in the given seconds, up to ten."""
    times: list[float] = []
    while len(times) < least or (sum(times) < seconds and len(times) < 10):
        times.append(time_gradient(problem))
    return times


def time_call(call: Callable[[], object]) -> float:
    finish_kernels()
    start = time.perf_counter()
    call()
    finish_kernels()
    return time.perf_counter() - start


def finish_kernels() -> None:
    """Wait for the GPU, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def time_interleaved(
    problem: Problem, call: Callable[[], object], first: float
) -> tuple[list[float], list[float]]:
    """More calls after the first, with gradients between them, so that both see the same machine."""
    times, gradients = [first], time_gradients(problem)
    while first < LONG_CALL_SECONDS and len(times) < REPETITIONS:
        if len(times) >= LEAST and sum(times) + sum(gradients) > PATIENCE_SECONDS:
            break
        times.append(time_call(call))
        gradients += time_gradients(problem, seconds=0.05, least=1)
    return times, gradients


class PeakMemory:
    """How far resident memory rises above where it stood: VmHWM, reset through /proc. Linux only."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # Memory freed earlier must not hide what the call takes.
        with open("/proc/self/clear_refs", "w") as handle:
            handle.write("5")
        self.before = read_status("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        self.mebibytes = read_status("VmHWM") - self.before


class PeakDeviceMemory:
    """The same on a GPU: the most that torch had allocated, above what it had allocated before."""

    def __enter__(self) -> PeakDeviceMemory:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated() / 2**20
        return self

    def __exit__(self, *exception: object) -> None:
        self.mebibytes = torch.cuda.max_memory_allocated() / 2**20 - self.before


def peak_memory(device: str) -> PeakMemory | PeakDeviceMemory:
    return PeakDeviceMemory() if device == "cuda" else PeakMemory()


def read_status(field: str, process: int | str = "self") -> float:
    """A field of /proc/PID/status, in MiB.

    >>> read_status("VmRSS") <= read_status("VmHWM")
    True
    """
    with open(f"/proc/{process}/status") as handle:
        for line in handle:
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    raise KeyError(f"/proc/{process}/status has no field {field!r}; peak memory needs Linux.")
