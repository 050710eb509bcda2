"""Random probes, and what the eigenvalue solvers require of an operator."""

from __future__ import annotations

import math
from typing import Literal, Protocol

import numpy as np
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
    shape = tuple(operator.shape)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
        need = "spectra need a square, non-empty one, such as A.T @ A"
        raise ValueError(f"the operator has shape {shape}; {need}.")
    if operator.dtype not in (torch.float32, torch.float64):
        way = "convert it to torch.float32 or torch.float64"
        raise TypeError(f"the operator has dtype {operator.dtype}; {way}.")
    return shape[0]


def power_of_two_scale(vector: Tensor) -> float:
    """The power of two just below the largest |entry|; 0 for a zero vector, inf when an entry is not finite.

    Dividing by a power of two is exact. Costs one host synchronisation.

    >>> power_of_two_scale(torch.tensor([3.0, -5.0])), power_of_two_scale(torch.zeros(2))
    (4.0, 0.0)
    """
    return power_of_two_of(float(vector.detach().abs().max()), largest_exponent(vector.dtype))


def largest_exponent(dtype: torch.dtype) -> int:
    """For a power of two that is, as its inverse, a normal number of the dtype."""
    return 126 if dtype == torch.float32 else 1000


def power_of_two_of(largest: float, limit: int) -> float:
    if not math.isfinite(largest):
        return math.inf
    if largest == 0:
        return 0.0
    return math.ldexp(1.0, max(-limit, min(limit, math.frexp(largest)[1] - 1)))


ProbeKind = Literal["gaussian", "rademacher"]

_MOST_DRAWN = 2**16


class ProbeStream:
    """An endless sequence of probes that depends only on seed, size, dtype and kind.

    Probes are drawn on the CPU, so every device sees the same ones, but for long ones, which a GPU
    draws by itself in a thousandth of the time. The global random state is left alone.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int,
        kind: ProbeKind = "gaussian",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.size = size
        self.kind = kind
        self.dtype = dtype
        self.device = device
        # After torch.manual_seed(0) the user's own weights are the numbers that seed 0 gives:
        # probes from the same seed would not be random with respect to the operator (50 % off in
        # tests).
        mixed = np.random.SeedSequence(seed % 2**64, spawn_key=(0x4E55,)).generate_state(1)[0]
        itself = torch.device(device).type == "cuda" and size > _MOST_DRAWN and kind == "gaussian"
        self._generator = torch.Generator(device if itself else "cpu").manual_seed(int(mixed))

    def draw(self) -> Tensor:
        if self.kind == "gaussian":
            place = self._generator.device
            probe = torch.randn(
                self.size, generator=self._generator, dtype=self.dtype, device=place
            )
        else:
            # Eight signs from every random byte: ten times as fast as a number for each sign.
            count = -(-self.size // 8)
            bits = torch.randint(0, 256, (count,), generator=self._generator, dtype=torch.uint8)
            signs = torch.from_numpy(np.unpackbits(bits.numpy(), count=self.size))
            probe = signs.to(self.dtype).mul_(2).sub_(1)
        return probe.to(self.device)

    def draw_block(self, count: int) -> Tensor:
        """The next `count` probes as the columns of a (size, count) matrix."""
        return torch.stack([self.draw() for _ in range(count)], dim=1)


def probe_stream(operator: Operator, seed: int, kind: ProbeKind = "gaussian") -> ProbeStream:
    size = operator_size(operator)
    return ProbeStream(size, seed=seed, kind=kind, dtype=operator.dtype, device=operator.device)


def random_like(tensor: Tensor, seed: int, dtype: torch.dtype | None = None) -> Tensor:
    """A random tensor of the shape and device, with the identity as its covariance."""
    dtype = dtype or tensor.dtype
    shape = tensor.shape
    size = tensor.numel()
    splits = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(1, len(shape))]
    if size <= _MOST_DRAWN or not splits:
        return ProbeStream(size, seed=seed, dtype=dtype, device=tensor.device).draw().view(shape)
    # An outer product: to draw a number for every weight of a large model takes longer than some
    # gradients.
    few, others = min(splits, key=sum)
    numbers = ProbeStream(few + others, seed=seed, dtype=dtype, device=tensor.device).draw()
    return torch.outer(numbers[:few], numbers[few:]).view(shape)
