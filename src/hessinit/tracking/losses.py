"""The training losses on the way, kept few and read late."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.results.track_record import MOST_LOSSES, thin


class Losses:
    """At most a thousand losses, evenly spread over the steps.

    A loss on a GPU is read only when it is needed: reading it at every step would make training wait.
    """

    def __init__(self, earlier: tuple[tuple[int, float], ...] = ()) -> None:
        self._kept: list[tuple[int, float | Tensor]] = list(earlier)
        self._written = earlier[-1][0] if earlier else -1
        common = math.gcd(*(step for step, _ in earlier))
        # As many as this were thinned already, by powers of two.
        self.stride = common & -common if len(earlier) >= MOST_LOSSES // 2 else 1
        self._latest: float | Tensor | None = None

    def add(self, step: int, loss: float | Tensor) -> None:
        self._latest = _as_given(loss)
        if self._kept and self._kept[-1][0] >= step:  # training went back to an earlier step
            self._kept = [pair for pair in self._kept if pair[0] < step]
            self._written = min(self._written, step - 1)
        if step % self.stride == 0:
            self._kept.append((step, self._latest))
        if len(self._kept) > MOST_LOSSES:
            self.stride *= 2
            self._kept = thin(self._kept, self.stride)

    def forget_after(self, step: int) -> bool:
        """Training went back to that step; says whether there were any after it."""
        kept = [pair for pair in self._kept if pair[0] <= step]
        forgets = len(kept) < len(self._kept)
        if forgets:
            self._latest = None
        self._kept, self._written = kept, min(self._written, step)
        return forgets

    @property
    def latest(self) -> float | None:
        """The one given last, whether it was kept or not."""
        return None if self._latest is None else float(self._latest)

    def all(self) -> tuple[tuple[int, float], ...]:
        self._kept = [(step, float(loss)) for step, loss in self._kept]
        return tuple((step, float(loss)) for step, loss in self._kept)

    def unwritten(self) -> list[tuple[int, float]]:
        """Those that came since this was last asked."""
        found = [(step, loss) for step, loss in self.all() if step > self._written]
        if found:
            self._written = found[-1][0]
        return found


def _as_given(loss: object) -> float | Tensor:
    if isinstance(loss, Tensor):
        if loss.is_complex() or loss.dtype == torch.bool:
            raise ProblemError(
                f"the loss given to step() has dtype {loss.dtype}; it must be a real number, or left out."
            )
        if loss.numel() != 1:
            raise ProblemError(
                f"the loss given to step() has shape {tuple(loss.shape)}; it must be a single number, such "
                "as loss.mean(), or left out."
            )
        # A copy: the loss may be divided in place afterwards, or live in a buffer that is used again.
        return loss.detach().clone() if loss.device.type != "cpu" else float(loss.detach())
    try:
        if isinstance(loss, str | bool):
            raise TypeError
        return float(loss)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        shown = f"{loss!r}" if isinstance(loss, str | bool) else f"a {type(loss).__name__}"
        raise ProblemError(
            f"the loss given to step() is {shown}; it must be a number, or left out."
        ) from None
