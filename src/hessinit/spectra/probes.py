"""Random probe vectors: the same bits for the same seed, whatever the device."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hessinit.spectra.protocol import Operator, operator_size

ProbeKind = Literal["gaussian", "rademacher"]

_MOST_DRAWN = 2**16


class ProbeStream:
    """An endless sequence of probes that depends only on seed, size, dtype and kind.

    Probes are drawn on the CPU and moved, so every device sees the same ones. They come one at a time from
    one generator: the first 8 of 100 probes are the 8 probes. The global random state is neither read nor
    moved.

    >>> stream = ProbeStream(4, seed=0, kind="rademacher")
    >>> stream.draw().abs().tolist()
    [1.0, 1.0, 1.0, 1.0]
    >>> stream.draw_block(3).shape
    torch.Size([4, 3])
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
        if kind not in ("gaussian", "rademacher"):
            raise ValueError(f"kind={kind!r} is unknown; choose from 'gaussian', 'rademacher'.")
        self.size, self.kind, self.dtype, self.device = size, kind, dtype, device
        self._generator = torch.Generator().manual_seed(_mix(seed))

    def draw(self) -> Tensor:
        """The next probe, of shape (size,)."""
        if self.kind == "gaussian":
            probe = torch.randn(self.size, generator=self._generator, dtype=self.dtype)
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


def random_like(tensor: Tensor, seed: int, dtype: torch.dtype | None = None) -> Tensor:
    """A random tensor of the shape and device, with the identity as its covariance.

    Large ones are outer products of two vectors: a gaussian number for every weight of a large model would
    take longer to draw than several of its gradients take.

    >>> random_like(torch.zeros(1000, 500), seed=0).square().mean().round(decimals=1)
    tensor(1.)
    """
    dtype, shape, size = dtype or tensor.dtype, tensor.shape, tensor.numel()
    splits = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(1, len(shape))]
    if size <= _MOST_DRAWN or not splits:
        return ProbeStream(size, seed=seed, dtype=dtype, device=tensor.device).draw().view(shape)
    few, others = min(splits, key=sum)
    numbers = ProbeStream(few + others, seed=seed, dtype=dtype, device=tensor.device).draw()
    return torch.outer(numbers[:few], numbers[few:]).view(shape)


def random_start(operator: Operator, seed: int) -> Tensor:
    """The gaussian vector that a Lanczos iteration starts from."""
    size = operator_size(operator)
    return ProbeStream(size, seed=seed, dtype=operator.dtype, device=operator.device).draw()


def _mix(seed: int) -> int:
    # After torch.manual_seed(0) the user's own weights and inputs are the numbers that seed 0 gives. Probes
    # from the same seed would be those very numbers: not random at all with respect to the operator, and 50 %
    # off in tests.
    return int(np.random.SeedSequence(seed % 2**64, spawn_key=(0x4E55,)).generate_state(1)[0])
