"""The general engine: Lanczos on products with a curvature matrix; right for every model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hessinit.engines.ends import Effort, Ends
from hessinit.operators.base import LinearOperator
from hessinit.results.estimates import Estimate
from hessinit.spectra.lanczos import lanczos
from hessinit.spectra.protocol import Operator


class LanczosEngine:
    """One Lanczos run per block. `semidefinite` blocks that cannot have full rank need only their top."""

    name = "lanczos"

    def __init__(
        self,
        build: Callable[[Sequence[str]], LinearOperator],
        effort: Effort,
        reason: str,
        rank: int | None = None,
    ) -> None:
        """`rank` bounds the rank of a positive semidefinite curvature; None when it may be indefinite."""
        self._build = build
        self._effort = effort
        self._rank = rank
        self.reason = reason

    def operator(self, names: Sequence[str]) -> LinearOperator:
        return self._build(names)

    def ends_of_each(self, names: Sequence[str]) -> dict[str, Ends]:
        return {name: self.ends([name]) for name in names}

    def ends(self, names: Sequence[str]) -> Ends:
        return find_ends(self._build(names), self._effort, self._rank, self.name, self.reason)


def find_ends(operator: Operator, effort: Effort, rank: int | None, engine: str, reason: str) -> Ends:
    """Both ends of a block on the weights; a rank-deficient semidefinite one has its bottom at 0."""
    size = int(operator.shape[0])
    if rank is not None and rank < size:
        found = lanczos(operator, ends="top", **effort.options)
        return Ends(found.top, zero_bottom(rank, size), engine, reason)
    found = lanczos(operator, ends="both", semidefinite=rank is not None, **effort.options)
    assert found.bottom is not None
    # One run finds both: its products are counted once.
    return Ends(found.top, dataclasses.replace(found.bottom, products=0), engine, reason)


def zero_bottom(rank: int, size: int) -> Estimate:
    """The smallest eigenvalue of a positive semidefinite matrix that is larger than its rank."""
    return Estimate(0.0, 0.0, True, f"positive semidefinite, with rank at most {rank} for {size} weights", 0)
