"""The Gram engine: Lanczos on small Gram matrices, for layers without one on the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hessinit.curvature import derivative_check, lanczos, operators
from hessinit.curvature.engine import Engine, Extremes, LanczosEngine, scaled, zero_bottom
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.gram import GramCurvature, LayerGram, SumOfGrams, WrittenGram
from hessinit.curvature.krylov import random_like
from hessinit.results.curvature_report import Estimate

# Beyond, the Cholesky factor of a matrix of that size costs more than the search that it saves.
_LARGEST_FACTORED = 2048


class GramLinearization(derivative_check.GraphLinearization):
    """The Jacobian as the Gram engine computes it, in the coordinates `Sᵀz` of the output."""

    def __init__(
        self, evaluation: Evaluation, columns: Tensor, grams: Mapping[str, LayerGram]
    ) -> None:
        super().__init__(evaluation)
        self._columns = columns
        self._grams = grams

    def coordinates(self, output: Tensor, examples: Tensor | None = None) -> Tensor:
        columns = self._columns
        if examples is not None:
            columns = columns[:, examples.to(output.device)]
        return (columns.to(output.dtype) * output).reshape(*columns.shape[:2], -1).sum(2).T

    def changes(self, direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: gram.push(direction[name]).view(-1, len(self._columns))
            for name, gram in self._grams.items()
        }

    def random_cotangent(self) -> Tensor:
        by_example = self._columns.reshape(*self._columns.shape[:2], -1)[..., 0]
        coefficients = random_like(by_example, derivative_check.seed_of_check(self.evaluation))
        return torch.einsum("cn,cn...->n...", coefficients, self._columns)


class GramEngine(Engine):
    """`grams` holds, per batch, the layers whose uses are known; `general` takes the others."""

    name = "gram"

    def __init__(
        self,
        grams: Sequence[dict[str, LayerGram]],
        unused: set[str],
        general: LanczosEngine,
        reason: str,
    ) -> None:
        self._grams = grams
        self._unused = unused
        self._general = general
        self.reason = reason
        self.settings = general.settings
        self.rank = general.rank

    def is_cheap(self, names: Sequence[str]) -> bool:
        return self._used(names) is not None

    def _used(self, names: Sequence[str]) -> list[str] | None:
        """The leaves that the forward uses; None if one of them has no Gram operator."""
        used = [name for name in names if name not in self._unused]
        return used if all(name in grams for name in used for grams in self._grams) else None

    def operator(self, names: Sequence[str]) -> operators.LinearOperator:
        used = self._used(names)
        if not used or len(used) < len(names):
            return self._general.operator(names)
        return GramCurvature([[grams[name] for name in used] for grams in self._grams])

    def extremes_of_each(self, names: Sequence[str]) -> dict[str, Extremes]:
        # The small Gram problems run in lockstep.
        small = [name for name in names if self._is_small([name])]
        extremes: dict[str, Extremes] = {}
        if small:
            grams = [self._grams[0][name] for name in small]
            watched = [
                self.settings.watched(gram, [name]) for name, gram in zip(small, grams, strict=True)
            ]
            tops = lanczos.largest_eigenvalues(
                watched,
                tolerance=self.settings.tolerance,
                max_iterations=self.settings.max_iterations,
                seed=self.settings.seed,
            )
            self.settings.report_done(*small)
            for name, gram, top in zip(small, grams, tops, strict=True):
                extremes[name] = self._from_gram(top, [gram])
        unknown = [name for name in names if self._used([name]) is None]
        if unknown:
            extremes |= self._general.extremes_of_each(unknown)
        return {name: extremes.get(name) or self._extremes_of_layer(name) for name in names}

    def extremes(self, names: Sequence[str]) -> Extremes:
        used = self._used(names)
        if used is None:
            return self._general.extremes(names)
        if not used:
            return self.unused()
        per_batch = [[grams[name] for name in used] for grams in self._grams]
        if self._is_small(used):
            extremes = self._extremes_of_small(per_batch[0], names)
            return extremes if len(used) == len(names) else replace(extremes, vector=None)
        block = self.settings.watched(GramCurvature(per_batch), names)
        if len(used) < len(names):
            # An unused weight makes the block singular, whatever the size of the rest.
            top = self.settings.largest_eigenvalue(block)
            return replace(self.unused(), top=top)
        first = per_batch[0][0]
        alone = len(per_batch) == len(per_batch[0]) == 1
        if alone and isinstance(first, WrittenGram) and first.weights <= _LARGEST_FACTORED:
            return self._extremes_of_written(first)
        rank = sum(grams[0].shape[0] for grams in per_batch)
        return self._search(rank, [block])[0]

    def _extremes_of_small(self, grams: Sequence[LayerGram], names: Sequence[str]) -> Extremes:
        """By Lanczos on the Gram matrix of one batch; the vector is that of the weights."""
        first = grams[0]
        gram = SumOfGrams(grams) if len(grams) > 1 else first
        search = self.settings.search(self.settings.watched(gram, names), "top")
        extremes = self._from_gram(lanczos.run_together([search])[0].top, grams)
        vector = search.vector().to(first.device, first.dtype)
        return replace(extremes, vector=operators.join([summand.pull(vector) for summand in grams]))

    def _extremes_of_written(self, gram: WrittenGram) -> Extremes:
        """Both ends from the curvature itself, a small matrix."""
        matrix = gram.factor.T @ gram.factor
        top = self.settings.largest_eigenvalue(matrix)
        bottom = lanczos.smallest_eigenvalue(
            matrix, tolerance=self.settings.tolerance, seed=self.settings.seed
        )
        top = scaled(top, gram.scale)
        return Extremes(top, scaled(bottom, gram.scale), self.name, self.reason)

    def _is_small(self, names: Sequence[str]) -> bool:
        """One batch, with fewer outputs than weights: the Gram matrix is the smaller of the two."""
        grams = [self._grams[0][name] for name in names if name in self._grams[0]]
        if not grams or len(self._grams) > 1:
            return False
        return grams[0].shape[0] < sum(gram.weights for gram in grams)

    def _from_gram(self, top: Estimate, grams: Sequence[LayerGram]) -> Extremes:
        bottom = zero_bottom(grams[0].shape[0], sum(gram.weights for gram in grams))
        return Extremes(scaled(top, grams[0].scale), bottom, self.name, self.reason)
