"""Gauss-Newton curvature by the Gram engine where it applies, layer by layer, and by Lanczos where it does not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hessinit.engines.ends import UNUSED, Effort, Ends
from hessinit.engines.gram import LayerGram, SumOfGrams
from hessinit.engines.lanczos_engine import LanczosEngine, find_ends, zero_bottom
from hessinit.estimate import Estimate
from hessinit.operators.base import LinearOperator, join, split
from hessinit.spectra.lanczos import lanczos


class GramCurvature(LinearOperator):
    """`VᵀV` on the weights of one or several layers, summed over batches: the Gauss-Newton block, by its Gram factors."""

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

    def ends(self, names: Sequence[str]) -> Ends:
        known = self._known(names)
        if known is None:
            return self._general.ends(names)
        if not known:
            return Ends(UNUSED, UNUSED, self.name, self.reason)
        parts = [[grams[name] for name in known] for grams in self._grams]
        rows = sum(grams[0].shape[0] for grams in parts)
        size = sum(int(torch.Size(gram.weight_shape).numel()) for gram in parts[0])
        if len(known) < len(names):
            size = max(size, rows + 1)  # an unused weight makes the block singular
        if len(parts) > 1 or rows >= size:
            return find_ends(GramCurvature(parts), self._effort, rows, self.name, self.reason)
        (single,) = parts
        gram: LinearOperator = single[0] if len(single) == 1 else SumOfGrams(single)
        effort = self._effort
        found = lanczos(gram, ends="top", tolerance=effort.tolerance, max_steps=effort.max_steps, seed=effort.seed)
        top, scale = found.top, single[0].scale
        scaled = Estimate(top.value * scale, top.error * scale, top.converged, top.reason, top.products)
        return Ends(scaled, zero_bottom(rows, size), self.name, self.reason)
