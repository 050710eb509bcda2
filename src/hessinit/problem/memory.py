"""Out of memory: say how much there was, how much an example takes, and what would fit."""

from __future__ import annotations

import contextlib
import mmap
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hessinit.errors import ProblemError
from hessinit.problem.problem import Problem

# What the derivatives keep beside a forward's activations: the graph of a backward pass and the products'
# own, or, with few outputs, a gradient by every activation for each of them.
_DERIVATIVES = 36
_FEW_OUTPUTS = 100
_SIGNS = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "alloc_failed",
)


@contextlib.contextmanager
def explained_memory(problem: Problem) -> Iterator[None]:
    """Around the work: an allocation that fails is answered with the number of examples that would fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as failure:
        if not is_out_of_memory(failure):
            raise
        # The frames that failed still hold what they had built.
        traceback.clear_frames(failure.__traceback__)
        raise ProblemError(_advice(problem)) from failure


def is_out_of_memory(failure: BaseException) -> bool:
    """
    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 GB"))
    True
    """
    known = isinstance(failure, (torch.OutOfMemoryError, MemoryError))
    return known or any(sign in str(failure).lower() for sign in _SIGNS)


def _advice(problem: Problem) -> str:
    examples, available = problem.examples, _available_bytes(problem)
    weights = sum(leaf.numel() for leaf in problem.leaves.values())
    text = f"out of memory on {problem.device} with {examples} examples and {weights:,} weights"
    fit = examples // 2
    try:
        each = _bytes_per_example(problem)
    except (RuntimeError, MemoryError, ValueError, IndexError, TypeError):
        each = 0
    if each and available is not None:
        text += f": about {_size(each)} an example, {_size(available)} available"
        fit = min(fit, available // each)
    ways = "fewer layers (layers=...), or a single curvature without top, trace or density"
    if fit < 1:
        return f"{text}. Not even one example may fit; measure {ways}, or use a device with more memory."
    how = "All batches are held at once, so pass fewer. " if len(problem.batches) > 1 else ""
    return f"{text}. About {fit} examples would fit. {how}If that is too few, measure {ways}."


def _bytes_per_example(problem: Problem) -> int:
    """What one example takes with all its derivatives, from what the graph of two examples keeps."""
    first = problem.batches[0]
    few = min(2, first.size)
    own = {leaf.untyped_storage().data_ptr() for leaf in problem.leaves.values()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = problem.output(first.take(torch.arange(few)))
    outputs = output.numel() // few
    times = _DERIVATIVES + (outputs if outputs <= _FEW_OUTPUTS else 0)
    return sum(kept.values()) * times // few


def _available_bytes(problem: Problem) -> int | None:
    """What the work could have had: all that is free or ours, less the model. None where it is unknown."""
    tensors = [*problem.model.parameters(), *problem.model.buffers(), *problem.leaves.values()]
    model = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if problem.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(problem.device)
        ours = torch.cuda.memory_reserved(problem.device)
        share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(problem.device)
        return int(min(free + ours, total * share)) - model
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        ours = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    except (OSError, StopIteration):
        return None
    return free + ours - model


def _size(count: float) -> str:
    """
    >>> _size(1536)
    '1.5 KiB'
    """
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.3g} {unit}"
