"""Random probe vectors, fixed by a seed."""

from __future__ import annotations

import functools
import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hessinit.curvature.krylov import Operator, operator_size

ProbeKind = Literal["gaussian", "rademacher"]

# A GPU draws longer probes itself: about a thousand times as fast as a CPU.
_LONGEST_FROM_CPU = 2**16


@functools.lru_cache(maxsize=256)
def _mixed_seed(seed: int) -> int:
    # After torch.manual_seed(0) the user's own weights are the numbers that seed 0 gives: probes
    # from the same seed would not be random with respect to the operator (50 % off in tests).
    return int(np.random.SeedSequence(seed, spawn_key=(0x4E55,)).generate_state(1)[0])


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
        is_on_gpu = torch.device(device).type == "cuda"
        draws_on_gpu = is_on_gpu and size > _LONGEST_FROM_CPU and kind == "gaussian"
        generator = torch.Generator(device if draws_on_gpu else "cpu")
        self._generator = generator.manual_seed(_mixed_seed(seed % 2**64))

    def draw(self) -> Tensor:
        generator = self._generator
        if self.kind == "gaussian":
            device = generator.device
            probe = torch.randn(self.size, generator=generator, dtype=self.dtype, device=device)
            return probe.to(self.device)
        # Eight signs from every random byte: ten times as fast as a number for each sign.
        count = -(-self.size // 8)
        bits = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
        signs = torch.from_numpy(np.unpackbits(bits.numpy(), count=self.size))
        return signs.to(self.dtype).mul_(2).sub_(1).to(self.device)

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
    splits = [
        (math.prod(shape[:dimension]), math.prod(shape[dimension:]))
        for dimension in range(1, len(shape))
    ]
    if size <= _LONGEST_FROM_CPU or not splits:
        return ProbeStream(size, seed=seed, dtype=dtype, device=tensor.device).draw().view(shape)
    # An outer product: to draw a number for every weight of a large model takes longer than some
    # gradients.
    rows, columns = min(splits, key=sum)
    numbers = ProbeStream(rows + columns, seed=seed, dtype=dtype, device=tensor.device).draw()
    return torch.outer(numbers[:rows], numbers[rows:]).view(shape)
