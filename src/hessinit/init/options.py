"""The options of `initialize_`, its constants (κ and the rest), and the norm that they ask for.

How each number was chosen, and what else was tried, is in docs/how-the-default-was-chosen.md; the
trainings are those of benchmarks/arena.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hessinit.errors import ProblemError, argument, check_number, check_positive, choose
from hessinit.init.apply_scheme import RESIDUAL_POWERS, SCHEMES, SYNONYMS
from hessinit.init.trace import WeightUse
from hessinit.problem.checks import check_switches, check_tolerance, check_whole
from hessinit.results.advice import DESCENTS, check_fraction


@dataclass(frozen=True)
class Kappa:
    """lr·‖H‖ at which training starts well, by the kind of network (benchmarks/arena)."""

    # Training soon lowers the curvature of a plain network, so twice the stability limit is safe.
    plain: float = 4.0
    # The curvature of a normalized network rises first.
    normalized: float = 0.5
    # lr·‖P^-½ H P^-½‖, the norm that Adam sees, of weights that are scaled along symmetries; chosen
    # by annealed losses of full trainings (benchmarks/untuned.py).
    adam: float = 1.75
    # The same for a quadratic loss.
    adam_quadratic: float = 7.0
    # The part of κ that weights which make the output of a normalized network have at least.
    readout: float = 0.25
    # Dropout adds noise to every step, so less is stable.
    dropout: float = 1.0
    # The curvature of a quadratic loss stays the same during training.
    quadratic: float = 1.0


@dataclass(frozen=True)
class Scaling:
    """How far gains go, and when new weights are taken back (benchmarks/arena/development.py)."""

    # The root mean square of the output under scaling="small-output". 0.1 and 1 train as well.
    small_output: float = 0.5
    # The same for a network with scale-free weights, whose curvature needs no large outputs.
    small_output_scale_free: float = 0.7
    # The same for drawn weights of a quadratic loss, if nothing is fitted: a larger output is noise
    # that training must first unlearn.
    small_output_quadratic: float = 0.1
    # Weights whose ‖H‖ exceeds the target by at most this factor get a small output, too.
    small_output_up_to: float = 2.0
    # Normalizations undo much of a gain: to have an effect, a smaller one would stop the learning.
    smallest_gain_normalized: float = 0.5
    # Where the last weight alone would raise the loss above this many times the loss of a zero
    # output, the others are enlarged instead and the output stays small.
    loud: float = 2.5
    # The old weights come back if a standard deviation exceeds the first number and the second
    # times the old one, or if the loss grew by the second. That happens where a small factor, such
    # as a LayerScale of 1e-5, precedes a weight that LSUV enlarges to make up for it.
    largest_deviation: float = 1000.0
    largest_growth: float = 100.0
    # The search measures norms to this part of the tolerance that the result must meet.
    search_fraction: float = 0.2


KAPPA = Kappa()
SCALING = Scaling()

# The steps of these divide by the size of recent gradients, as Adam's do: weights are fitted to the
# curvature that Adam sees.
ADAM_LIKE = ("adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adamax")
ADAM_LIKE_ENDINGS = ("", "8bit", "4bit", "fp8", "schedulefree")  # of names, as of AdamW8bit
# What scheme="auto" stands for; in deep chains it draws smaller or larger pre-activations than 1.
AUTO_SCHEME = "lsuv"
SYMMETRIES = "symmetries"  # instead of a scaling: along transformations that change no output
NOT_SCALED = "none"  # instead of a scaling: the scheme's weights were left as they are

_CHOICES = {
    "rule": ["network", "layers"],
    "scaling": ["auto", "all", "last", "small-output"],
    "curvature": ["gauss-newton", "hessian"],
    "biases": ["auto", "zero", "keep"],
    "residual": ["auto", *RESIDUAL_POWERS],
}


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The rarer options of `initialize_`, checked when they are given.

    `rule="layers"` brings every layer's norm to the target instead of the network's. `scheme` draws
    the weights: a closed form or "lsuv" as in `apply_scheme_`, "keep" for the present weights, or
    "auto": "lsuv", with smaller or larger pre-activations in deep chains. `scaling`: "all", "last"
    and "small-output" choose the weights that a gain scales. `curvature` is "gauss-newton" or
    "hessian". Biases become 0 with the weights that are drawn; `biases="keep"` leaves them, "zero"
    also resets those of weights that are kept. `residual="scaled"` divides the last weights of
    residual branches by the square root of their number, "small" by the number; "auto" takes
    "scaled" in normalized networks, except for Adam.

    The norm must meet its target to `tolerance`, in at most `max_measurements` (by default 10, or
    12 for layers), without raising the initial loss above `max_sharpening` times the loss of a zero
    output; `strict=True` raises where it does not. `report=True` measures every layer before and
    after, False nothing; by default what is cheap is measured. `momentum` is that of "momentum" and
    "nesterov". Trials on `data` take `trial_steps` steps, by default as many as suit the length of
    the training. `overwrite` also draws what is trainable in a model with frozen weights.

    >>> Fit(scheme="orthogonal", tolerance=0.01).tolerance
    0.01
    >>> Fit(scheme="ortogonal")
    Traceback (most recent call last):
    hessinit.errors.ProblemError: scheme='ortogonal' is unknown; ... Did you mean 'orthogonal'?
    """

    rule: str = "network"
    scheme: str = "auto"
    scaling: str = "auto"
    curvature: str = "gauss-newton"
    biases: str = "auto"
    residual: str = "auto"
    tolerance: float = 0.05
    max_measurements: int | None = None
    # Beyond, the curvature comes from a softmax that is confident without knowing anything; it
    # soon falls.
    max_sharpening: float = 4.0
    report: bool | None = None
    trial_steps: int | None = None
    momentum: float = 0.9
    strict: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        choose("scheme", self.scheme, ["auto", "keep", *SCHEMES], SYNONYMS)
        for name, choices in _CHOICES.items():
            choose(name, getattr(self, name), choices)
        if self.rule == "layers" and self.scaling != "auto":
            raise ProblemError(
                argument("scaling", self.scaling),
                " has no meaning for ",
                argument("rule", "layers"),
                "; leave it out.",
            )
        check_switches(
            strict=self.strict,
            report=self.report is not None and self.report,
            overwrite=self.overwrite,
        )
        rule = (
            "1 or more: how many times the loss of a zero output the initial loss may be; "
            "math.inf: any"
        )
        numbers: dict[str, float] = {
            "tolerance": check_tolerance(self.tolerance),
            "max_sharpening": check_number(
                "max_sharpening", self.max_sharpening, lambda n: n >= 1, rule
            ),
            "momentum": check_fraction("momentum", self.momentum),
        }
        if self.trial_steps is not None:
            numbers["trial_steps"] = check_whole("trial_steps", self.trial_steps, at_least=3)
        if self.max_measurements is not None:
            numbers["max_measurements"] = check_whole(
                "max_measurements", self.max_measurements, at_least=1
            )
        for name, number in numbers.items():
            object.__setattr__(self, name, number)


@dataclass(frozen=True)
class FitGoal:
    """The norm to reach, and the learning rate and κ that it follows from, if it was not given."""

    target: float | None
    lr: float | None = None
    kappa: float | None = None


@dataclass(frozen=True)
class FitRequest:
    """What weights are fitted to: a learning rate of an optimizer, or a norm; and how.

    `flatter` divides κ. `redraws`: new weights are drawn also where symmetries would do with the
    user's own.

    >>> request = FitRequest(lr=0.1, optimizer="momentum")
    >>> request.lr, request.momentum, request.max_measurements
    (0.1, 0.9, 10)
    """

    lr: Any = None
    target: Any = None
    optimizer: str = "sgd"
    fit: Fit = field(default_factory=Fit)
    flatter: float = 1.0
    redraws: bool = False

    def __post_init__(self) -> None:
        if self.lr is not None and self.target is not None:
            raise ProblemError(
                argument("lr", self.lr),
                " and ",
                argument("target", self.target),
                " both set the norm to reach; pass one of them.",
            )
        if self.fit.rule == "layers" and self.lr is not None and self.is_adaptive:
            raise ProblemError(
                argument("rule", "layers"),
                " with ",
                argument("optimizer", self.optimizer),
                " and ",
                argument("lr", self.lr),
                ": its steps do not grow with the gradient, so no rate says how sharp a layer may "
                "be; pass ",
                argument("target"),
                " instead.",
            )
        if self.lr is not None and self.lr != "auto":
            object.__setattr__(self, "lr", check_positive("lr", self.lr, "such as 0.1, or 'auto'"))
        if self.target is not None:
            norm = check_positive("target", self.target, "the ‖H‖ to reach, such as 1.0")
            object.__setattr__(self, "target", norm)

    def with_options(self, **options: Any) -> FitRequest:
        """The same request with other options of its `Fit`."""
        return replace(self, fit=replace(self.fit, **options))

    @property
    def is_adaptive(self) -> bool:
        """Whether the steps do not grow with the gradient: no rate asks for a curvature."""
        return self.optimizer not in DESCENTS

    @property
    def is_adam_like(self) -> bool:
        """Whether an adaptive optimizer sees the curvature that Adam sees."""
        name = self.optimizer.lower()
        return any(name.removesuffix(ending) in ADAM_LIKE for ending in ADAM_LIKE_ENDINGS)

    @property
    def momentum(self) -> float:
        """0 for optimizers without it."""
        return self.fit.momentum if self.optimizer in ("momentum", "nesterov") else 0.0

    @property
    def max_measurements(self) -> int:
        return self.fit.max_measurements or {"network": 10, "layers": 12}[self.fit.rule]

    @property
    def fits_symmetries(self) -> bool:
        is_seen = self.is_adam_like or not self.is_adaptive
        is_usual = self.fit.rule == "network" and self.fit.scaling == "auto"
        return self.lr is not None and is_seen and is_usual

    @property
    def insists(self) -> bool:
        """Whether the weights must be scaled even where that does not help the training."""
        return self.fit.scaling != "auto" or self.lr is None

    @property
    def reports(self) -> bool:
        """Whether to measure the curvature before and after; for Adam, nothing else reads it."""
        if self.fit.report is None:
            return not self.is_adaptive or self.lr is None
        return self.fit.report

    @property
    def scheme_name(self) -> str:
        return AUTO_SCHEME if self.fit.scheme == "auto" else self.fit.scheme

    @property
    def norm_tolerance(self) -> float:
        """The relative error of the norms that the search measures."""
        return self.fit.tolerance * SCALING.search_fraction

    @property
    def search_tolerance(self) -> float:
        """In log ‖H‖; leaves room for the errors of the measured norms."""
        return math.log1p(self.fit.tolerance) * (1 - 2 * SCALING.search_fraction)

    def goal(self, kappa: float, norm: float, unscaled: bool) -> FitGoal:
        """The norm to reach for this κ, where the scheme's weights have the given norm.

        Momentum makes lasting steps 1/(1 − momentum) times as long. lr="auto" takes the rate that
        suits the `unscaled` weights, κ/‖H‖ (at least 1/‖H‖); or 1/‖H‖, where the weights can be
        scaled to suit any rate. There is none for weights without curvature.
        """
        if self.lr is None:
            return FitGoal(self.target or 1.0)
        kappa = kappa / self.flatter
        rate = self.lr
        shorter = 1 - self.momentum
        if rate == "auto":
            if not 0 < norm < math.inf:
                return FitGoal(kappa, None, kappa)
            rate = (max(kappa, 1.0) if unscaled else 1.0) * shorter / norm
        return FitGoal(kappa * shorter / rate, rate, kappa)


@dataclass(frozen=True)
class NetworkTraits:
    """Whether a network normalizes features, reads tokens, drops units, has a quadratic loss."""

    normalized: bool = False
    tokens: bool = False
    drops: bool = False
    quadratic: bool = False

    @classmethod
    def of(cls, uses: Sequence[WeightUse], quadratic: bool = False) -> NetworkTraits:
        return cls(
            normalized=any(use.norm_follows or use.upstream.end == "norm" for use in uses),
            tokens=any(use.kind == "embedding" for use in uses),
            drops=any(use.upstream.keep < 1 and use.upstream.dropout_active for use in uses),
            quadratic=quadratic,
        )

    @property
    def kappa(self) -> float:
        """lr·‖H‖ at which training starts well."""
        if self.normalized:
            return KAPPA.normalized
        if self.quadratic:
            return KAPPA.quadratic
        return KAPPA.dropout if self.drops else KAPPA.plain

    def symmetry_kappa(self, adaptive: bool) -> float:
        """lr·‖H‖ for weights that are scaled along symmetries, as the optimizer sees them."""
        if adaptive:
            return KAPPA.adam_quadratic if self.quadratic else KAPPA.adam
        return KAPPA.quadratic if self.quadratic else KAPPA.plain

    @property
    def reason_not_to_sharpen(self) -> str:
        """Empty for a plain network."""
        # A larger head on features of fixed size, or that rare tokens seldom train, only adds
        # noise; and a quadratic loss has no softmax that would lower the curvature again.
        if self.normalized:
            return "its features are normalized"
        if self.tokens:
            return "it reads tokens"
        return "its loss is quadratic" if self.quadratic else ""
