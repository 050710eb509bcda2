"""The norm of the loss's curvature at the output, example by example."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hessinit.curvature.engines import LanczosSettings
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.krylov import Array
from hessinit.curvature.layer_uses import in_proportion, probe_examples
from hessinit.curvature.probes import ProbeStream
from hessinit.curvature.singular_values import BatchedMap, largest_singular_values
from hessinit.products.places import Place


@dataclass(frozen=True)
class LossNorms:
    """‖H_z‖ of every example, as far up as its error reaches; `each` is None when the loss couples them."""

    each: Array | None
    whole: float
    converged: bool = True

    def bound(self, logarithms: Array) -> float:
        """Σ ‖H_z‖ factor² from the logarithms of one factor for each example, or of one for the batch.

        A product of many layers overflows long before its logarithm does.
        """
        norms = np.array([self.whole])
        if self.each is not None and len(logarithms) == len(self.each):
            norms = self.each
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            return float(np.exp(np.logaddexp.reduce(np.log(norms) + 2 * logarithms)))


def loss_norms(evaluation: Evaluation, effort: LanczosSettings) -> LossNorms:
    """By Lanczos on products with H_z, which cost a fraction of a gradient: the model is not involved."""
    output = evaluation.output.detach()
    size = output.shape[0] if output.ndim else 1
    apart = size > 1 and not _couples(evaluation, output, effort.seed)
    place = Place(output, tuple(output.shape), size if apart else 1)

    def curve(vectors: Tensor) -> Tensor:
        return place.gather(evaluation.output_hessian(place.scatter(vectors)))

    maps = BatchedMap(place.size, place.each, place.each, curve, curve)
    found = largest_singular_values(maps, dtype=output.dtype, device=output.device, **effort.options)
    upper = found.upper * evaluation.weight
    return LossNorms(upper if apart else None, float(upper.max()), found.converged)


def _couples(evaluation: Evaluation, output: Tensor, seed: int) -> bool:
    """Whether a change of some examples' outputs changes the loss gradient of others."""
    size = output.shape[0]
    stream = ProbeStream(output.numel() + size, seed=seed, dtype=output.dtype, device=output.device)
    probe = stream.draw()
    probes = probe_examples(
        lambda tangent: [evaluation.output_hessian(tangent)], probe[size:].view_as(output), probe[:size]
    )
    return any(
        not in_proportion(whole.reshape(size, -1), shared.reshape(size, -1), factors)
        for (whole,), (shared,), factors in probes
    )
