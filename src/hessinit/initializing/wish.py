"""What the caller asked for, read and checked; and the norm to aim at, once the network is known."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hessinit.initializing.nature import Nature

# Their steps do not grow with the gradient, so that no rate asks for a curvature.
ADAPTIVE = ("adam", "adamw")


@dataclass(frozen=True)
class Aim:
    """A norm, and where it comes from: a rate and κ, or neither where it was given."""

    target: float
    lr: float | None = None
    kappa: float | None = None


@dataclass(frozen=True)
class Wish:
    """The arguments of `initialize_`. `lr` is a rate, "auto" or None; `momentum` is 0 without any."""

    lr: float | str | None
    target: float | None
    optimizer: str
    momentum: float
    rule: str
    scheme: str
    freedom: str
    biases: str
    residual: str
    tolerance: float
    most: int
    most_sharpening: float

    @property
    def by_rate(self) -> bool:
        """Whether a learning rate decides, and not a norm that was given."""
        return self.lr is not None

    @property
    def scheme_alone(self) -> bool:
        """Whether nothing is left to do after the scheme."""
        return self.by_rate and self.optimizer in ADAPTIVE and self.rule == "network"

    def aim(self, nature: Nature, norm: float, as_it_is: bool) -> Aim:
        """The norm to aim at, for a network of that nature whose start has that norm.

        Momentum makes lasting steps 1/(1 − momentum) times as long. A rate of our own is the one that suits
        the start `as_it_is`, κ/‖H‖ (at least γ* = 1/‖H‖); or γ*, where the start can be scaled to suit any
        rate. There is none for a start without curvature.
        """
        if self.lr is None:
            return Aim(1.0 if self.target is None else self.target)
        kappa = nature.kappa
        shorter = 1 - self.momentum
        if not isinstance(self.lr, str):
            return Aim(kappa * shorter / self.lr, self.lr, kappa)
        times = max(kappa, 1.0) if as_it_is else 1.0
        rate = times * shorter / norm if 0 < norm < math.inf else None
        if rate is None:
            return Aim(kappa, None, kappa)
        return Aim(kappa * shorter / rate, rate, kappa)
