"""Mean, spread and correlation, gathered piece by piece (Chan, Golub and LeVeque 1979)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Moments:
    """The mean and the standard deviation of all numbers added so far.

    >>> moments = Moments()
    >>> moments.add(torch.tensor([1.0, 2.0]))
    >>> moments.add(torch.tensor([6.0]))
    >>> moments.mean, round(moments.std, 6)  # of 1, 2, 6: the square root of 14/3
    (3.0, 2.160247)
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean = 0.0
        self._squares = 0.0

    def add(self, values: Tensor) -> None:
        if values.numel() == 0:
            return
        values = values.double()
        count, mean = values.numel(), float(values.mean())
        step = mean - self._mean
        total = self.count + count
        self._squares += float((values - mean).square().sum()) + step * step * self.count * count / total
        self._mean += step * count / total
        self.count = total

    @property
    def mean(self) -> float | None:
        """None without numbers."""
        return self._mean if self.count else None

    @property
    def std(self) -> float | None:
        """Of the numbers themselves (divided by their count); None without numbers."""
        return math.sqrt(self._squares / self.count) if self.count else None


class Correlations:
    """Pearson's r over examples of `a[:, c]` and `b[:, c, j]`, for every pair (c, j).

    >>> correlations = Correlations(1e-6)
    >>> correlations.add(torch.tensor([[0.0], [1.0]]), torch.tensor([[[1.0, 5.0]], [[3.0, 5.0]]]))
    >>> correlations.add(torch.tensor([[2.0]]), torch.tensor([[[2.0, 5.0]]]))
    >>> correlations.examples, correlations.coefficients().tolist()  # 5, 5, 5 has no variance
    (3, [0.5])
    """

    def __init__(self, least_relative_std: float) -> None:
        self.examples = 0
        self._least = least_relative_std
        self._means = torch.zeros(2, dtype=torch.float64)
        self._products = torch.zeros(3, dtype=torch.float64)

    def add(self, a: Tensor, b: Tensor) -> None:
        """`a` is (examples, outputs), `b` is (examples, outputs, units)."""
        pair = torch.stack([a.double().unsqueeze(-1).expand_as(b), b.double()])
        mean = pair.mean(dim=1)
        a_off, b_off = pair - mean.unsqueeze(1)
        products = torch.stack([(a_off * b_off).sum(0), a_off.square().sum(0), b_off.square().sum(0)])
        if not self.examples:
            self._means, self._products, self.examples = mean, products, len(a)
            return
        total = self.examples + len(a)
        step = mean - self._means
        between = torch.stack([step[0] * step[1], step[0].square(), step[1].square()])
        self._products = self._products + products + between * (self.examples * len(a) / total)
        self._means = self._means + step * (len(a) / total)
        self.examples = total

    def coefficients(self) -> Tensor:
        """r of the pairs in which both sides vary by more than rounding does, flat."""
        together, *squares = self._products
        varies = torch.ones_like(together, dtype=torch.bool)
        for mean, square in zip(self._means, squares, strict=True):
            varies &= square > self.examples * (self._least * mean).square()
        return (together / (squares[0] * squares[1]).sqrt())[varies].clamp(-1, 1)
