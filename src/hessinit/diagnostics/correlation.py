"""Does the loss gradient depend on the layer gradient? Variance arguments assume that it does not.

Over the examples i of the batch, Pearson's r between ∂L/∂z_ic, the loss gradient by output c, and
∂z_ic/∂h_ij, the gradient of that output by unit j of a layer: the question of the paper's Table 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hessinit.curvature.probes import ProbeStream
from hessinit.diagnostics.examples import arrange, gradients_at
from hessinit.diagnostics.moments import Correlations
from hessinit.problem.layer_values import Recorded

LEAST_EXAMPLES = 8
# One backward pass for each output; pairs of them with the units. 256 coefficients tell 5 % from 10 %.
MOST_OUTPUTS = 8
MOST_UNITS = 32
_SIGNIFICANT = 1.96  # 5 % of a standard normal lie beyond
# Beyond rounding: what varies by less, relative to its mean, is a constant. In units of the dtype's epsilon.
_ROUNDING = 100.0


@dataclass(frozen=True)
class Correlation:
    """The root mean square r over `pairs` pairs and the share of significant ones, or why there are none."""

    strength: float | None = None
    share: float | None = None
    pairs: int = 0
    reason: str = ""


class CorrelationStudy:
    """Gathers the pairs of every layer over batches."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._seed = seed
        self._gathered: dict[str, Correlations] = {}
        self._reasons: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._rounding = _ROUNDING * torch.finfo(dtype).eps

    def add(self, recorded: Recorded, loss_gradient: Tensor) -> None:
        """One batch: 2 backward passes to tell the examples apart and one for each output chosen."""
        output = recorded.output
        names = [name for name, passages in recorded.passages.items() if passages]
        if not names:
            return
        if output.ndim == 0:
            for name in names:
                self._reasons[name] = "the output does not count examples"
            return
        places = {name: [passage.after for passage in recorded.passages[name]] for name in names}
        every = [place for name in names for place in places[name]]
        arrangements = iter(arrange(output, every, self._seed))
        arranged = {name: [next(arrangements) for _ in places[name]] for name in names}
        kept = [name for name in names if None not in arranged[name]]
        for name in set(names) - set(kept):
            self._reasons[name] = "examples see each other after it"
        if not kept:
            return
        loss_gradient = loss_gradient.flatten(1) if output.ndim > 1 else loss_gradient.unsqueeze(1)
        outputs = _choose(loss_gradient.shape[1], MOST_OUTPUTS, self._seed)
        sizes = {name: [place.value.numel() // len(output) for place in places[name]] for name in kept}
        units = {name: _choose(sum(sizes[name]), MOST_UNITS, self._seed + 1) for name in kept}
        rows: dict[str, list[Tensor]] = {name: [] for name in kept}
        wanted = [place for name in kept for place in places[name]]
        for chosen in outputs.tolist():
            cotangent = output.new_zeros(output.shape)  # not zeros_like: an output may lie transposed
            cotangent.view(len(output), -1)[:, chosen] = 1
            gradients = iter(gradients_at(output, wanted, cotangent))
            for name in kept:
                parts = [one.by_example(next(gradients)) for one in arranged[name] if one is not None]
                rows[name].append(_pick(parts, units[name]))
        for name in kept:
            shape = (loss_gradient.shape[1], *sizes[name])
            if self._shapes.setdefault(name, shape) == shape:  # else its units are not the same ones
                gathered = self._gathered.setdefault(name, Correlations(self._rounding))
                gathered.add(loss_gradient[:, outputs], torch.stack(rows[name], dim=1))

    def conclude(self, name: str) -> Correlation:
        """What was found for this layer."""
        if name in self._reasons:
            return Correlation(reason=self._reasons[name])
        gathered = self._gathered.get(name)
        if gathered is None or gathered.examples < LEAST_EXAMPLES:
            return Correlation(reason=f"a correlation needs at least {LEAST_EXAMPLES} examples")
        found = gathered.coefficients()
        if not len(found):
            return Correlation(reason="its layer gradient is the same for every example")
        limit = math.tanh(_SIGNIFICANT / math.sqrt(gathered.examples - 3))  # Fisher's z
        share = float((found.abs() > limit).double().mean())
        return Correlation(float(found.square().mean().sqrt()), share, len(found))


def _choose(size: int, most: int, seed: int) -> Tensor:
    """At most so many of `size` indices, at random, in order."""
    if size <= most:
        return torch.arange(size)
    return ProbeStream(size, seed=seed).draw().topk(most).indices.sort().values


def _pick(parts: list[Tensor], units: Tensor) -> Tensor:
    """The chosen columns of the parts side by side, without copying the rest."""
    picked, start = [], 0
    for part in parts:
        inside = units[(units >= start) & (units < start + part.shape[1])] - start
        picked.append(part[:, inside.to(part.device)])
        start += part.shape[1]
    return torch.cat(picked, dim=1)
