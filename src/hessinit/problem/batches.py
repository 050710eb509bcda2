"""One batch or many, read once and counted in examples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.problem.left_as_found import untouched_random_state
from hessinit.problem.structures import map_tensors, tensors_in


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of `size` examples."""

    inputs: Any
    targets: Any
    size: int

    def take(self, examples: Tensor) -> Batch:
        """Only these examples: every tensor whose first dimension counts the examples is indexed."""

        def pick(tensor: Tensor) -> Tensor:
            follows = tensor.ndim > 0 and tensor.shape[0] == self.size
            return tensor[examples.to(tensor.device)] if follows else tensor

        return Batch(map_tensors(pick, self.inputs), map_tensors(pick, self.targets), len(examples))


def read_batches(batch: Any) -> tuple[Batch, ...]:
    """`(inputs, targets)`, or any finite iterable of such pairs (a list, a DataLoader), as batches.

    >>> import torch
    >>> [b.size for b in read_batches([(torch.ones(4, 2), torch.ones(4)), (torch.ones(1, 2), torch.ones(1))])]
    [4, 1]
    """
    if _is_pair(batch):
        return (_count(*batch, place=""),)
    if isinstance(batch, (Tensor, dict, str)) or not isinstance(batch, Iterable):
        raise ProblemError(
            f"batch is a {type(batch).__name__}; it must be (inputs, targets), or an iterable of such pairs. "
            "For a model that needs no targets, pass (inputs, None) and a loss that ignores its second argument."
        )
    with untouched_random_state():
        pairs = list(batch)
    if not pairs:
        raise ProblemError("batch is an empty iterable; it must hold at least one (inputs, targets) pair.")
    for index, pair in enumerate(pairs):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            found = f"{type(pair).__name__} of {len(pair)}" if isinstance(pair, (tuple, list)) else type(pair).__name__
            raise ProblemError(f"batch {index} is a {found}; every batch must be a pair (inputs, targets).")
    return tuple(_count(*pair, place=f"batch {index}: ") for index, pair in enumerate(pairs))


def _is_pair(batch: Any) -> bool:
    """`(inputs, targets)`, not a list of two batches: those are pairs themselves."""
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        return False
    first, second = batch
    both_pairs = all(isinstance(item, (tuple, list)) and len(item) == 2 for item in (first, second))
    if isinstance(batch, list):
        return not both_pairs and isinstance(first, Tensor) and not isinstance(second, (tuple, list))
    # ((x1, x2), y) is one batch with two inputs; ((x, y), (x, y)) can only be two batches if it is a list.
    return True


def _count(inputs: Any, targets: Any, place: str) -> Batch:
    sized = [tensor for tensor in (*tensors_in(targets), *tensors_in(inputs)) if tensor.ndim > 0]
    if not sized:
        raise ProblemError(f"{place}inputs and targets hold no tensor with a first dimension, so no examples.")
    size = int(sized[0].shape[0])
    lengths = [int(tensor.shape[0]) for tensor in tensors_in(inputs) if tensor.ndim > 0]
    if lengths and lengths[0] and size % lengths[0] == 0:
        size = lengths[0]  # targets flattened over examples and positions, as language models like them
    if any(tensor.numel() == 0 for tensor in sized):
        empty = next(tensor for tensor in sized if tensor.numel() == 0)
        raise ProblemError(f"{place}the batch is empty (a tensor of shape {tuple(empty.shape)}); pass at least one example.")
    if isinstance(inputs, Tensor) and isinstance(targets, Tensor) and targets.ndim > 0 and inputs.ndim > 0:
        # Equal sizes at the front or at the second place (time first) are the two layouts people use.
        if inputs.shape[0] != size and size not in inputs.shape[:2]:
            raise ProblemError(
                f"{place}inputs have {inputs.shape[0]} examples (shape {tuple(inputs.shape)}) and targets {size} "
                f"(shape {tuple(targets.shape)}); both must count the same examples."
            )
    return Batch(inputs, targets, size)


def cast(structure: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Floating tensors in `dtype`, everything on `device`; a tensor that is right already is not copied."""

    def convert(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    return map_tensors(convert, structure)
