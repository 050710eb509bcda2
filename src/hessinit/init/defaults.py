"""All defaults of `initialize_` (κ and the rest), its arguments as a checked config, and network traits.

How each number was chosen, and what else was tried, is in docs/how-the-default-was-chosen.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hessinit.errors import ProblemError, check_number, check_positive, choose
from hessinit.init.apply_scheme import RESIDUAL_POWERS, SCHEMES, SYNONYMS
from hessinit.init.trace import WeightUse
from hessinit.problem.validate import check_tolerance, check_whole
from hessinit.results.advice import check_fraction

# lr·‖H‖ of the network at initialization. Training soon lowers the curvature of a plain network, so
# that twice the stability limit is safe; that of a normalized one rises first.
KAPPA = 4.0
KAPPA_NORMALIZED = 0.5
# lr·‖P^-½ H P^-½‖, the norm that Adam sees, of weights that can be scaled along symmetries.
KAPPA_ADAM = 7.0
# Dropout adds noise to every step, so that less is stable.
KAPPA_DROPOUT = 1.0
# The curvature of a quadratic loss stays the same during training.
KAPPA_QUADRATIC = 1.0
# Normalizations undo much of a gain: a smaller one would have to be so small that it stops the
# learning.
SMALLEST_GAIN_NORMALIZED = 0.5

# What scheme="auto" stands for; in deep chains its pre-activations may be smaller or larger than 1.
AUTO_SCHEME = "lsuv"

# The root mean square of the output under scaling="small-output".
SMALL_OUTPUT = 0.5
# The same for a network with scale-free weights, whose curvature does not need large outputs.
SMALL_OUTPUT_SCALE_FREE = 0.7
# Weights whose ‖H‖ is above the target by at most this factor are scaled to a small output too, if
# possible.
SMALL_OUTPUT_UP_TO = 2.0

# Sharpening stops where it would raise the loss above this many times the loss of a zero output:
# beyond, the curvature comes with a softmax that is confident without knowing anything, and soon
# falls.
MAX_SHARPENING = 4.0

# Where the last weight alone would raise the loss above this many times the loss of a zero output,
# the others are enlarged instead and the output kept small, as in homogeneous networks.
LOUD = 2.5

MAX_MEASUREMENTS = {"network": 10, "layers": 12}

# The old weights are put back if a new one has a standard deviation above the first number and
# above the second number times the old one, or if the loss has grown by the second number. That
# happens where a small factor, such as a LayerScale of 1e-5, precedes a weight that LSUV scales to
# compensate for it.
ABSURD_SIZE = 1000.0
ABSURD_GROWTH = 100.0

# Norms are measured in the search to this part of the tolerance that the result must meet.
SEARCH_FRACTION = 0.2

# The steps of these do not grow with the gradient, so that no learning rate asks for a curvature.
ADAPTIVE = ("adam", "adamw")

SCALINGS = ("all", "last", "small-output")
SYMMETRIES = "symmetries"  # in the place of a scaling: along transformations that change no output
NOT_SCALED = "none"  # in the place of a scaling: the scheme's weights were left as they are


@dataclass(frozen=True)
class NetworkTraits:
    """Whether normalizations set its features' size, it reads tokens, drops units, has a quadratic loss."""

    normalized: bool = False
    tokens: bool = False
    drops: bool = False
    quadratic: bool = False

    @classmethod
    def of(cls, uses: Sequence[WeightUse], quadratic: bool = False) -> NetworkTraits:
        normalized = any(use.norm_follows or use.upstream.end == "norm" for use in uses)
        drops = any(use.upstream.keep < 1 and use.upstream.dropout_active for use in uses)
        return cls(normalized, any(use.kind == "embedding" for use in uses), drops, quadratic)

    @property
    def kappa(self) -> float:
        """lr·‖H‖ at which training starts well."""
        if self.normalized:
            return KAPPA_NORMALIZED
        return KAPPA_QUADRATIC if self.quadratic else KAPPA_DROPOUT if self.drops else KAPPA

    @property
    def reason_not_to_sharpen(self) -> str:
        """Empty for a plain network."""
        # A larger head on features of fixed size, or that rare tokens seldom train, only adds
        # noise; and a quadratic loss has no softmax that would lower the curvature again.
        if self.normalized:
            return "its features are normalized"
        return (
            "it reads tokens" if self.tokens else "its loss is quadratic" if self.quadratic else ""
        )


@dataclass(frozen=True)
class Goal:
    """The norm to reach, and where it comes from: a learning rate and κ, or neither where it was given."""

    target: float | None
    lr: float | None = None
    kappa: float | None = None


@dataclass
class Config:
    """The arguments of `initialize_`, checked before any work; `momentum` is 0 for optimizers without it.

    >>> config = Config(lr=0.1, optimizer="momentum")
    >>> config.lr, config.momentum, config.max_measurements
    (0.1, 0.9, 10)
    """

    lr: Any = None
    target: Any = None
    optimizer: str = "sgd"
    momentum: float = 0.9
    rule: str = "network"
    scheme: str = "auto"
    scaling: str = "auto"
    curvature: str = "gauss-newton"
    biases: str = "auto"
    residual: str = "auto"
    tolerance: float = 0.05
    max_measurements: Any = None
    max_sharpening: float = MAX_SHARPENING
    report: bool | None = None
    flatter: float = 1.0  # divides κ

    def __post_init__(self) -> None:
        choose("rule", self.rule, ["network", "layers"])
        choose("scheme", self.scheme, ["auto", "keep", *SCHEMES], SYNONYMS)
        choose("scaling", self.scaling, ["auto", *SCALINGS])
        choose("curvature", self.curvature, ["gauss-newton", "hessian"])
        choose("biases", self.biases, ["auto", "zero", "keep"])
        choose("residual", self.residual, ["auto", *RESIDUAL_POWERS])
        choose("optimizer", self.optimizer, ["sgd", "momentum", "nesterov", *ADAPTIVE])
        if self.rule == "layers" and self.scaling != "auto":
            raise ProblemError(
                f"scaling={self.scaling!r} has no meaning for rule='layers'; leave it out."
            )
        if self.lr is not None and self.target is not None:
            raise ProblemError(
                f"lr={self.lr!r} and target={self.target!r} both set the norm to reach; pass one of them."
            )
        if self.rule == "layers" and self.lr is not None and self.optimizer in ADAPTIVE:
            raise ProblemError(
                f"rule='layers' with optimizer={self.optimizer!r} and lr={self.lr!r}: its steps do not grow "
                "with the gradient, so that no rate says how sharp a layer may be; pass target= instead."
            )
        if self.lr is not None and self.lr != "auto":
            self.lr = check_positive("lr", self.lr, "such as 0.1, or 'auto'")
        if self.target is not None:
            self.target = check_positive("target", self.target, "the ‖H‖ to reach, such as 1.0")
        momentum = check_fraction("momentum", self.momentum)
        self.momentum = momentum if self.optimizer in ("momentum", "nesterov") else 0.0
        rule = "1 or more: how many times the loss of a zero output the initial loss may be; math.inf: any"
        check_number("max_sharpening", self.max_sharpening, lambda number: number >= 1, rule)
        self.tolerance = check_tolerance(self.tolerance)
        if self.max_measurements is None:
            self.max_measurements = MAX_MEASUREMENTS[self.rule]
        self.max_measurements = check_whole("max_measurements", self.max_measurements, at_least=1)

    @property
    def is_adaptive(self) -> bool:
        return self.optimizer in ADAPTIVE

    @property
    def fits_symmetries(self) -> bool:
        return self.lr is not None and self.rule == "network" and self.scaling == "auto"

    @property
    def reports(self) -> bool:
        """Whether the curvature is measured before and after; nothing but the reports reads it for Adam."""
        return (
            not (self.is_adaptive and self.lr is not None) if self.report is None else self.report
        )

    @property
    def scheme_name(self) -> str:
        return AUTO_SCHEME if self.scheme == "auto" else self.scheme

    @property
    def search_tolerance(self) -> float:
        """In log ‖H‖; leaves room for the search's own errors of measurement."""
        return math.log1p(self.tolerance) * (1 - 2 * SEARCH_FRACTION)

    def goal(self, kappa: float, norm: float, unscaled: bool) -> Goal:
        """The norm to reach for this κ, where the scheme's weights have that norm.

        Momentum makes lasting steps 1/(1 − momentum) times as long. lr="auto" takes the rate that
        suits the `unscaled` weights, κ/‖H‖ (at least 1/‖H‖); or 1/‖H‖, where the weights can be
        scaled to suit any rate. There is none for weights without curvature.
        """
        if self.lr is None:
            return Goal(1.0 if self.target is None else self.target)
        kappa = kappa / self.flatter
        rate = self.lr
        shorter = 1 - self.momentum
        if rate == "auto":
            if not 0 < norm < math.inf:
                return Goal(kappa, None, kappa)
            rate = (max(kappa, 1.0) if unscaled else 1.0) * shorter / norm
        return Goal(kappa * shorter / rate, rate, kappa)
