"""Adam, AdamW and RMSprop on a quadratic, with their preconditioner held still."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hessinit.results.advice import check_fraction, check_nonnegative

ADAPTIVE = ("adam", "adamw", "rmsprop")


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """An optimizer that divides by `P = √v + eps`, `v` a running mean of squared gradients.

    `momentum` is Adam's β₁ or RMSprop's momentum, `memory` Adam's β₂ or RMSprop's α. Adam corrects both means
    for their start at 0: its first step is `g/(|g| + eps)`. RMSprop does not: `g/(√(1 − α)|g| + eps)`.

    In the coordinates `P^½ w` the curvature is `P^-½ H P^-½`. With `a` its largest eigenvalue, Adam is heavy
    ball with dampening β₁, stable up to `lr (1 − β₁) a = 2 + 2β₁` (Cohen et al. 2022); the decoupled decay of
    AdamW adds `(1 + β₁) decay` to the left of it. RMSprop is heavy ball without dampening.

    >>> round(Adaptive(kind="adam", momentum=0.9, memory=0.999, eps=1e-8).edge(2.0), 9)
    19.0
    """

    kind: str
    momentum: float
    memory: float
    eps: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        names = ("momentum", "alpha") if self.kind == "rmsprop" else ("betas[0]", "betas[1]")
        check_fraction(names[0], self.momentum)
        check_fraction(names[1], self.memory)
        check_nonnegative("eps", self.eps)
        check_nonnegative("weight_decay", self.weight_decay)

    @property
    def decoupled_decay(self) -> float:
        """AdamW's decay, which acts on the weights; the others' is part of the gradient."""
        return self.weight_decay if self.kind == "adamw" else 0.0

    @property
    def gradient_decay(self) -> float:
        """The decay that is part of the gradient."""
        return self.weight_decay - self.decoupled_decay

    @property
    def first_share(self) -> float:
        """√v after the first step, over |g|."""
        return math.sqrt(1 - self.memory) if self.kind == "rmsprop" else 1.0

    @property
    def lasting(self) -> float:
        """How far a unit of rate moves in the end, over one step; Adam's mean gradient is one already."""
        return 1 / (1 - self.momentum) if self.kind == "rmsprop" else 1.0

    def best(self, norm: float) -> float:
        """The rate whose lasting step is `1/norm`, the one of the largest guaranteed decrease."""
        total = (norm + self.decoupled_decay) * self.lasting
        return 1 / total if norm else math.inf

    def edge(self, norm: float) -> float:
        """The largest stable rate while the preconditioner stays as it is."""
        share = 1.0 if self.kind == "rmsprop" else 1 - self.momentum
        total = share * norm + (1 + self.momentum) * self.decoupled_decay
        return (2 + 2 * self.momentum) / total if norm else math.inf

    def __str__(self) -> str:
        decay = f", weight_decay={self.weight_decay:g}" if self.weight_decay else ""
        if self.kind == "rmsprop":
            momentum = f", momentum={self.momentum:g}" if self.momentum else ""
            return f"RMSprop(alpha={self.memory:g}{momentum}, eps={self.eps:g}{decay})"
        name = "AdamW" if self.kind == "adamw" else "Adam"
        return f"{name}(betas=({self.momentum:g}, {self.memory:g}), eps={self.eps:g}{decay})"
