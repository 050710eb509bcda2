"""One factor for every weight tensor, moved by Adam, as GradInit does it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Goal = Literal["loss", "constraint"]
_FIRST, _SECOND, _EPSILON = 0.9, 0.999, 1e-8


class Scales:
    """Factors on top of the weights as drawn. Each goal has Adam moments of its own, as in the authors' code.

    Tensors that are zero cannot be scaled and are left out. Biases may shrink to zero, weights to `smallest`.
    """

    def __init__(self, weights: dict[str, nn.Parameter], rate: float, smallest: float) -> None:
        self.rate = rate
        self.weights = {name: weight for name, weight in weights.items() if bool(weight.detach().any())}
        self.drawn = [weight.detach().clone() for weight in self.weights.values()]
        self.least = torch.tensor([0.0 if is_bias(name) else smallest for name in self.weights]).double()
        self.values = torch.ones_like(self.least)
        self._finite = self.values
        self._start_moments()

    def _start_moments(self) -> None:
        zeros = torch.zeros_like(self.values)
        self._moments = dict.fromkeys(("loss", "constraint"), (0, zeros, zeros))

    def slopes(self, gradients: dict[str, Tensor]) -> Tensor:
        """The derivative by every factor, from the derivative by every weight."""
        pairs = zip(self.weights, self.drawn, strict=True)
        return torch.stack([(gradients[name].double() * drawn.double()).sum() for name, drawn in pairs]).cpu()

    def step_(self, slopes: Tensor, goal: Goal, clip: float) -> None:
        """One step of Adam on the factors, each slope cut to ±`clip`."""
        slopes = slopes.clamp(-clip, clip)
        count, mean, square = self._moments[goal]
        count += 1
        mean = _FIRST * mean + (1 - _FIRST) * slopes
        square = _SECOND * square + (1 - _SECOND) * slopes**2
        self._moments[goal] = (count, mean, square)
        direction = (mean / (1 - _FIRST**count)) / ((square / (1 - _SECOND**count)).sqrt() + _EPSILON)
        self._finite = self.values  # the slopes were finite here
        self._write_(torch.maximum(self.values - self.rate * direction, self.least))

    def go_back_(self) -> None:
        """To the factors before the last step, without its momentum: here the loss is not finite."""
        self._start_moments()
        self._write_(self._finite)

    @torch.no_grad()
    def _write_(self, values: Tensor) -> None:
        self.values = values
        for weight, drawn, value in zip(self.weights.values(), self.drawn, values.tolist(), strict=True):
            weight.copy_(drawn).mul_(value)


def is_bias(name: str) -> bool:
    """By its name, as PyTorch's modules call it: `bias`, `in_proj_bias`, `bias_hh_l0`."""
    return "bias" in name.rsplit(".", 1)[-1]
