"""GradInit (Zhu et al. 2021, arXiv:2102.08098): scale every weight so that the first step helps most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from arena.competitors.evaluation import (
    Forward,
    Loss,
    differentiate,
    evaluate,
    evaluating,
    inner,
    multiply_hessian,
    trained_weights,
)
from arena.competitors.overlapping import overlapping_pairs
from arena.competitors.scales import Scales
from hessinit.errors import choose

Optimizer = Literal["sgd", "adam"]
# The authors' settings: SGD's first step has at most this length (lr = 0.1, ‖g‖₂ ≤ 1); for Adam, ‖g‖₁ ≤ 1000.
SGD_STEP = 0.1
ADAM_GAMMA = 1000.0
# The authors cut the slopes of loss/η at ±1, with η = 0.1: ±0.1 for those of the loss itself.
_LOSS_CLIP, _CONSTRAINT_CLIP = 0.1, 1.0


def gradinit_(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Any],
    *,
    lr: float,
    optimizer: Optimizer = "sgd",
    iterations: int = 150,
    scale_lr: float = 0.02,
    gamma: float | None = None,
    step: float | None = None,
    smallest: float = 0.01,
    through_step: bool = True,
    seed: int = 0,
    forward: Forward | None = None,
) -> None:
    """Multiply every weight and every nonzero bias, as drawn, by a learned factor, in place.

    The factors minimise the loss on S̃ after one step on S, of length `step` along the gradient ("sgd") or of
    `step` in every weight along its sign ("adam"), while the gradient's norm on S (L2, or L1 for "adam") is
    at most `gamma`; above it, an iteration lowers that norm instead. S̃ shares half of its examples with S.

    The authors' scripts begin with He's weights and train at one rate, with gamma = 1 and step = 0.1 at
    lr = 0.1 (Adam: gamma = 1000, step near lr). For SGD at other rates we keep the length of the first step:
    gamma = 0.1/lr and step = 0.1. With gamma = 1 and step = lr, MLPs of depth 10 did not train at 0.01 on
    MNIST, where He's weights do. The scripts take an epoch of 390 iterations (780 for Adam) with scale_lr
    chosen for each network from 1e-3 to 1e-1; here 150 at one middle value.

    `through_step=False` holds the step fixed when differentiating, as the authors' code does; the paper's
    objective, and the default, is the loss after the step, whose derivative goes through it ("adam": no
    difference, a sign has none). Costs about 5 gradients an iteration through the step, 2 otherwise and 3
    while above `gamma` (measured on a CNN; overheads of small MLPs make it up to three times as many), and
    two copies of the weights.

    Where loss, gradient or slope is not finite the factors return to the last ones at which they were; a
    network that overflows as drawn stays as drawn.
    """
    choose("optimizer", optimizer, ["sgd", "adam"])
    if gamma is None:
        gamma = SGD_STEP / lr if optimizer == "sgd" else ADAM_GAMMA
    if step is None:
        step = SGD_STEP if optimizer == "sgd" else lr
    weights = trained_weights(model)
    pairs = overlapping_pairs(batches, seed)
    with evaluating(model):
        scales = Scales(weights, scale_lr, smallest)
        for _ in range(iterations):
            first = _Step(model, loss, next(pairs), step, optimizer, through_step, forward)
            above = first.norm > gamma
            slopes = scales.slopes(first.norm_gradient() if above else first.loss_gradient()[1])
            if not bool(slopes.isfinite().all()):
                scales.go_back_()
            elif above:
                scales.step_(slopes, "constraint", _CONSTRAINT_CLIP)
            else:
                scales.step_(slopes, "loss", _LOSS_CLIP)


class _Step:
    """The first step from the present weights: the gradient's norm and the loss after it, differentiated."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        pair: tuple[Any, Any],
        size: float,
        optimizer: Optimizer,
        through_step: bool,
        forward: Forward | None,
    ) -> None:
        before, self._after = pair
        self._model, self._loss, self._forward = model, loss, forward
        self._size, self._through = size, through_step and optimizer == "sgd"
        self._named = trained_weights(model)
        self._weights = list(self._named.values())
        self._gradients = differentiate(evaluate(model, loss, before, forward), self._weights, again=True)
        plain = [gradient.detach() for gradient in self._gradients]
        if optimizer == "sgd":
            self.norm = float(inner(plain, plain).sqrt())
            self._length = max(self.norm, torch.finfo(torch.float32).tiny)
            self._direction = [gradient / self._length for gradient in plain]
        else:
            self._direction = [gradient.sign() for gradient in plain]
            self.norm = float(inner(plain, self._direction))

    def norm_gradient(self) -> dict[str, Tensor]:
        """How the gradient's norm changes with the weights: H·g/‖g‖₂, or H·sign(g) for ‖g‖₁."""
        return self._by_name(multiply_hessian(self._gradients, self._direction, self._weights))

    def loss_gradient(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss after the step, and how it changes with the weights before the step."""
        with self._taken():
            value = evaluate(self._model, self._loss, self._after, self._forward)
            after = differentiate(value, self._weights)
        if not self._through:
            return value.detach(), self._by_name(after)
        # The chain rule: w − size·d(w) has the derivative I − size·∂d, and for d = g/‖g‖ that is
        # ∂dᵀ·after = H·(after − d⟨d, after⟩)/‖g‖, one more backward pass.
        along = inner(self._direction, after).to(after[0].dtype)
        across = [(each - along * d) / self._length for each, d in zip(after, self._direction, strict=True)]
        through = multiply_hessian(self._gradients, across, self._weights)
        total = [direct - self._size * turned for direct, turned in zip(after, through, strict=True)]
        return value.detach(), self._by_name(total)

    @contextmanager
    def _taken(self) -> Iterator[None]:
        # Through .data: autograd would otherwise refuse the graph of the gradient, which holds the weights
        # themselves. They are back, to the last bit, before that graph is used.
        kept = [weight.detach().clone() for weight in self._weights]
        try:
            for weight, direction in zip(self._weights, self._direction, strict=True):
                weight.data.sub_(direction, alpha=self._size)
            yield
        finally:
            for weight, value in zip(self._weights, kept, strict=True):
                weight.data.copy_(value)

    def _by_name(self, gradients: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._named, gradients, strict=True))
