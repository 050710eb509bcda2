"""What everything in `spectra` asks of an operator."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Operator(Protocol):
    """A symmetric n × n matrix known by its products; a plain symmetric torch matrix is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def __matmul__(self, other: Tensor, /) -> Tensor: ...


def operator_size(operator: Operator) -> int:
    """n of an n × n floating-point operator; anything else is refused.

    >>> operator_size(torch.eye(3))
    3
    """
    shape = tuple(operator.shape)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
        raise ValueError(
            f"the operator has shape {shape}; spectra need a square, non-empty one. "
            "For a rectangular A pass A.T @ A or A @ A.T."
        )
    if operator.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"the operator has dtype {operator.dtype}; spectra need torch.float32 or torch.float64. "
            "Convert it with .float() or .double()."
        )
    return shape[0]


def require_at_least(name: str, value: int, least: int, reason: str) -> None:
    """Refuse a count that is too small, in the words of the caller."""
    if value < least:
        raise ValueError(f"{name}={value} is too few: {reason}. Pass {name}={least} or more.")


def require_tolerance(tolerance: float) -> None:
    """Refuse a tolerance that no computation can mean."""
    if not 0 < tolerance < 1:
        raise ValueError(
            f"tolerance={tolerance} is out of range; it is a relative error between 0 and 1, such as 1e-3."
        )
