"""Gauss-Newton curvature by the Gram engine where it applies, and by Lanczos where it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hessinit.engines.ends import UNUSED, Effort, Ends, scaled
from hessinit.engines.gram import LayerGram, SumOfGrams, WrittenGram
from hessinit.engines.lanczos_engine import LanczosEngine, find_ends, zero_bottom
from hessinit.engines.output_root import OutputRoot
from hessinit.operators.base import LinearOperator, join, split
from hessinit.operators.derivative_check import GraphLinearization, seed_of_check
from hessinit.operators.evaluation import Evaluation
from hessinit.operators.finite_differences import Direction
from hessinit.results.estimates import Estimate
from hessinit.spectra.lanczos import lanczos
from hessinit.spectra.probes import random_like
from hessinit.spectra.smallest import smallest_eigenvalue
from hessinit.spectra.together import tops_together

# Beyond, the Cholesky factor of a matrix of that size costs more than the search it saves.
_LARGEST_MATRIX = 2048


class GramCurvature(LinearOperator):
    """`VᵀV` on the weights of one or several layers, summed over batches: the Gauss-Newton block."""

    def __init__(self, per_batch: Sequence[Sequence[LayerGram]]) -> None:
        self.per_batch = per_batch
        first = per_batch[0]
        self.shapes = [gram.weight_shape for gram in first]
        size = sum(int(torch.Size(shape).numel()) for shape in self.shapes)
        self.shape, self.dtype, self.device = (size, size), first[0].dtype, first[0].device

    def _product(self, vector: Tensor) -> Tensor:
        parts = split(vector, self.shapes)
        total: list[Tensor] | None = None
        for grams in self.per_batch:
            outputs = [gram.push(part) for gram, part in zip(grams, parts, strict=True)]
            moved = outputs[0] if len(outputs) == 1 else torch.stack(outputs).sum(0)
            moved = moved * grams[0].scale
            pulled = [gram.pull(moved) for gram in grams]
            total = pulled if total is None else [a + b for a, b in zip(total, pulled, strict=True)]
        assert total is not None
        return join(total)


class GramLinearization:
    """The Jacobian as the Gram engine computes it, in the coordinates `Sᵀz` of the output."""

    def __init__(self, evaluation: Evaluation, root: OutputRoot, grams: Mapping[str, LayerGram]) -> None:
        self._columns = root.columns
        self._grams = grams
        self._graph = GraphLinearization(evaluation)
        self._seed = seed_of_check(evaluation)

    def coordinates(self, output: Tensor, examples: Tensor | None = None) -> Tensor:
        """(examples, columns)."""
        columns = self._columns if examples is None else self._columns[:, examples.to(output.device)]
        return (columns.to(output.dtype) * output).reshape(*columns.shape[:2], -1).sum(2).T

    def push(self, direction: Direction) -> Tensor:
        count = len(self._columns)
        known = [
            self._grams[name].push(part).view(-1, count)
            for name, part in direction.items()
            if name in self._grams
        ]
        others = {name: part for name, part in direction.items() if name not in self._grams}
        if others:
            known.append(self.coordinates(self._graph.push(others)))
        return torch.stack(known).sum(0)

    def effects(self, direction: Direction) -> dict[str, float]:
        others = {name: part for name, part in direction.items() if name not in self._grams}
        found = {}
        if others:
            factors = random_like(self._columns.reshape(*self._columns.shape[:2], -1)[..., 0], self._seed)
            cotangent = torch.einsum("cn,cn...->n...", factors, self._columns)
            found = self._graph.effects(others, cotangent)
        known = {
            name: self._grams[name].push(part) for name, part in direction.items() if name in self._grams
        }
        return {**found, **{name: float(change.double().norm()) for name, change in known.items()}}


def _is_singular(grams: Sequence[LayerGram]) -> bool:
    return grams[0].shape[0] < sum(gram.weights for gram in grams)


class GramEngine:
    """`grams` holds, per batch, the layers whose uses are known; `general` takes the others."""

    name = "gram"

    def __init__(
        self,
        grams: Sequence[dict[str, LayerGram]],
        unused: set[str],
        general: LanczosEngine,
        effort: Effort,
        reason: str,
    ) -> None:
        self._grams = grams
        self._unused = unused
        self._general = general
        self._effort = effort
        self.reason = reason

    def _known(self, names: Sequence[str]) -> list[str] | None:
        used = [name for name in names if name not in self._unused]
        return used if all(name in grams for name in used for grams in self._grams) else None

    def operator(self, names: Sequence[str]) -> LinearOperator:
        known = self._known(names)
        if not known or len(known) < len(names):
            return self._general.operator(names)
        return GramCurvature([[grams[name] for name in known] for grams in self._grams])

    def ends_of_each(self, names: Sequence[str]) -> dict[str, Ends]:
        """Every layer on its own; the small Gram problems run in lockstep."""
        small = [name for name in names if self._is_small([name])]
        found: dict[str, Ends] = {}
        if small:
            grams = [self._grams[0][name] for name in small]
            tops = tops_together(grams, **self._effort.options)
            for name, gram, top in zip(small, grams, tops, strict=True):
                found[name] = self._from_gram(top, [gram])
        return {name: found.get(name) or self.ends([name]) for name in names}

    def ends(self, names: Sequence[str]) -> Ends:
        """The block of several leaves together."""
        known = self._known(names)
        if known is None:
            return self._general.ends(names)
        if not known:
            return Ends(UNUSED, UNUSED, self.name, self.reason)
        parts = [[grams[name] for name in known] for grams in self._grams]
        rows = sum(grams[0].shape[0] for grams in parts)
        if not self._is_small(names):
            (first, *others) = [gram for grams in parts for gram in grams]
            small = isinstance(first, WrittenGram) and not others and first.weights <= _LARGEST_MATRIX
            if small and len(known) == len(names):
                assert isinstance(first, WrittenGram)
                return self._from_matrix(first)
            if len(known) == len(names):
                return find_ends(GramCurvature(parts), self._effort, rows, self.name, self.reason)
            # An unused weight makes the block singular, whatever the size of the rest.
            top = lanczos(GramCurvature(parts), ends="top", **self._effort.options).top
            return Ends(top, UNUSED, self.name, self.reason)
        (single,) = parts
        gram: LinearOperator = single[0] if len(single) == 1 else SumOfGrams(single)
        found = lanczos(gram, ends="top", **self._effort.options)
        return self._from_gram(found.top, single)

    def _is_small(self, names: Sequence[str]) -> bool:
        """One batch, with fewer outputs than weights: the Gram matrix is the smaller of the two."""
        known = self._known(names)
        if not known or len(self._grams) > 1:
            return False
        return _is_singular([self._grams[0][name] for name in known])

    def _from_gram(self, top: Estimate, grams: Sequence[LayerGram]) -> Ends:
        bottom = zero_bottom(grams[0].shape[0], sum(gram.weights for gram in grams))
        return Ends(scaled(top, grams[0].scale), bottom, self.name, self.reason)

    def _from_matrix(self, gram: WrittenGram) -> Ends:
        """Fewer weights than outputs, and written out: both ends from the small matrix itself."""
        matrix = gram.factor.T @ gram.factor
        top = lanczos(matrix, ends="top", **self._effort.options).top
        bottom = smallest_eigenvalue(matrix, tolerance=self._effort.tolerance, seed=self._effort.seed)
        return Ends(scaled(top, gram.scale), scaled(bottom, gram.scale), self.name, self.reason)
