"""The largest eigenvalues of several positive semidefinite operators of one size, by Lanczos in lockstep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hessinit.results.estimates import Estimate
from hessinit.spectra.krylov import Array, small_eigenpairs
from hessinit.spectra.outcome import SETTLING_STEPS, SMALL, conclude
from hessinit.spectra.probes import random_start
from hessinit.spectra.protocol import Operator
from hessinit.spectra.residuals import reach_of_unseen, read_end
from hessinit.spectra.scale import power_of_two_scale

_ROWS = 32


@dataclass
class _Run:
    """One operator on its way."""

    index: int
    operator: Operator
    scale: float
    dtype: torch.dtype
    steps: int = 0
    exhausted: bool = False


def tops_together(
    operators: Sequence[Operator], *, tolerance: float = 1e-3, max_steps: int = 200, seed: int = 0
) -> list[Estimate]:
    """What `lanczos(ends="top")` gives for each, with the bookkeeping of all done at once.

    The same products, but a step costs the bookkeeping of one run instead of many: for small operators that
    is most of the time. An operator that has converged takes no further part.

    >>> two = [torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.diag(torch.tensor([5.0, 0.0, 0.0]))]
    >>> [round(top.value, 5) for top in tops_together(two)]
    [3.0, 5.0]
    """
    lockstep = _Lockstep(operators, seed)
    limit = min(max_steps, lockstep.size)
    found: dict[int, Estimate] = {}
    for step in range(1, limit + 1):
        lockstep.advance()
        over = [run.exhausted or not 0 < run.scale < math.inf or step == limit for run in lockstep.runs]
        if (step <= SETTLING_STEPS or lockstep.size <= SMALL) and not any(over):
            continue
        values, vectors, residuals = lockstep.ritz()
        finished = []
        for row, run in enumerate(lockstep.runs):
            # Most runs are far from done most of the time: one comparison tells.
            if (lockstep.size <= SMALL or residuals[row, -1] > 0.1 * values[row, -1]) and not over[row]:
                continue
            change = 0.0 if run.exhausted else abs(values[row, -1] - lockstep.earlier(row))
            share = abs(float(vectors[row, 0, -1]))
            unseen = reach_of_unseen(float(residuals[row, -1]), share, lockstep.size)
            end = read_end(values[row], residuals[row], -1, float(change), unseen)
            if over[row] or end.is_converged(tolerance, end.value):
                finished.append(row)
                found[run.index] = conclude(end, run, end.value, tolerance, max_steps)
        lockstep.drop(finished)
        if not lockstep.runs:
            break
    return [found[index] for index in range(len(operators))]


class _Lockstep:
    """The Lanczos bases of the operators still running, one row each, extended together.

    The bookkeeping is numpy's: the vectors are short, and its calls cost a fraction of torch's.
    """

    def __init__(self, operators: Sequence[Operator], seed: int) -> None:
        first = operators[0]
        self.size = int(first.shape[0])
        self._like = random_start(first, seed)
        start = self._like.cpu().numpy()
        rows = min(_ROWS, self.size + 1)
        self._basis = np.empty((len(operators), rows, self.size), dtype=start.dtype)
        self._basis[:, 0] = start / np.linalg.norm(start)
        self.runs = [_Run(index, operator, 0.0, first.dtype) for index, operator in enumerate(operators)]
        self._products: Array | None = self._multiply(0)
        # Powers of two keep every run the same for 1e-30·A and 1e30·A.
        for run, product in zip(self.runs, self._products, strict=True):
            run.scale = power_of_two_scale(torch.from_numpy(product))
        self._small = np.zeros((len(operators), rows, rows))
        self._betas = np.zeros(len(operators))
        self._largest = np.zeros(len(operators))
        self._rounding = 10 * float(torch.finfo(first.dtype).eps)
        self._tops: list[Array] = []

    def _multiply(self, step: int) -> Array:
        like = self._like
        vectors = [torch.from_numpy(row).to(like.device) for row in self._basis[:, step]]
        products = [run.operator @ vector for run, vector in zip(self.runs, vectors, strict=True)]
        return np.stack([product.detach().cpu().numpy() for product in products])

    def advance(self) -> None:
        """One product each, orthogonalized against its own basis."""
        step = self.runs[0].steps
        products, self._products = self._products, None
        if products is None:
            products = self._multiply(step)
        inverse = [1 / run.scale if 0 < run.scale < math.inf else 1.0 for run in self.runs]
        known = self._basis[:, : step + 1]
        alphas = np.zeros(len(self.runs))
        with np.errstate(invalid="ignore", over="ignore"):  # `_record` looks for what is not finite
            remainder = products * np.array(inverse, dtype=products.dtype)[:, None]
            # Twice is enough (Parlett, after Kahan): one pass leaves ghosts of converged eigenvalues.
            for _ in range(2):
                along = np.matmul(known, remainder[:, :, None])
                remainder = remainder - np.matmul(along.transpose(0, 2, 1), known)[:, 0]
                alphas += along[:, step, 0]
            betas = np.linalg.norm(remainder, axis=1).astype(np.float64)
        if step + 1 == self._basis.shape[1]:
            self._basis = np.concatenate((self._basis, np.empty_like(self._basis)), axis=1)
            self._small = np.pad(self._small, ((0, 0), (0, step + 1), (0, step + 1)))
        with np.errstate(invalid="ignore", divide="ignore"):
            self._basis[:, step + 1] = remainder / betas[:, None].astype(remainder.dtype)
        self._record(step, alphas, betas)

    def _record(self, step: int, alphas: Array, betas: Array) -> None:
        finite = np.isfinite(alphas) & np.isfinite(betas)
        alphas, betas = np.where(finite, alphas, 0.0), np.where(finite, betas, 0.0)
        self._small[:, step, step] = alphas
        if step:
            self._small[:, step, step - 1] = self._betas
        self._largest = np.maximum(self._largest, np.maximum(np.abs(alphas), betas))
        exhausted = (betas <= self._rounding * self._largest) | (step + 1 == self.size)
        self._betas = np.where(exhausted, 0.0, betas)
        for run, ended, good in zip(self.runs, exhausted.tolist(), finite.tolist(), strict=True):
            run.steps, run.exhausted = step + 1, ended
            if not good:
                run.scale = math.inf

    def ritz(self) -> tuple[Array, Array, Array]:
        """Values, small eigenvectors and residuals of all runs, ascending."""
        steps = self.runs[0].steps
        values, vectors = small_eigenpairs(self._small[:, :steps, :steps])
        self._tops.append(values[:, -1])
        return values, vectors, self._betas[:, None] * np.abs(vectors[:, -1])

    def earlier(self, row: int) -> float:
        """The top value some steps ago; -inf when it was not looked at yet."""
        return float(self._tops[-1 - SETTLING_STEPS][row]) if len(self._tops) > SETTLING_STEPS else -math.inf

    def drop(self, finished: Sequence[int]) -> None:
        """Go on without these."""
        if not finished:
            return
        kept = [row for row in range(len(self.runs)) if row not in finished]
        self.runs = [self.runs[row] for row in kept]
        self._basis, self._small = self._basis[kept], self._small[kept]
        self._betas, self._largest = self._betas[kept], self._largest[kept]
        self._tops = [tops[kept] for tops in self._tops]
