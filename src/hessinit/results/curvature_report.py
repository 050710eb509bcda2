"""The curvature of a network and of its layers: norms, and how far to trust them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from hessinit.errors import ProblemError, choose
from hessinit.results.result import LATER, ByName, NamedLayer, PlainData, Result, presenter

if TYPE_CHECKING:
    from hessinit.results.advice import LearningRateAdvice


@dataclass(frozen=True)
class Estimate:
    """A computed value, its error, whether it is good enough, and what it cost.

    `error` is an absolute half-width: the truth is expected within `value ± error`. `products`
    counts the matrix-vector products that were spent; 0 means that the value came for free with
    another one.

    >>> round(Estimate(2.0, 0.001, True, "residual below tolerance", 9).relative_error, 6)
    0.0005
    """

    value: float
    error: float
    converged: bool
    reason: str
    products: int = 0

    @property
    def relative_error(self) -> float:
        """`error / |value|`; 0 when both are 0."""
        if self.error == 0:
            return 0.0
        return self.error / abs(self.value) if self.value else math.inf


# The end of the note on a finding that trial steps have overruled.
LEARN_ALL_THE_SAME = "Trial steps on this batch learn all the same."


@dataclass(frozen=True)
class Spread:
    """The norm of each batch. For equal batches the norm over all examples is at most their mean.

    >>> spread = Spread((1.0, 2.0, 3.0))
    >>> spread.mean, spread.standard_deviation, round(spread.standard_error, 3)
    (2.0, 1.0, 0.577)
    """

    norms: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over the batches; inf or nan when a norm is."""
        return math.fsum(norm / len(self.norms) for norm in self.norms)

    @property
    def standard_deviation(self) -> float:
        """The standard deviation of the sample (divided by batches − 1); nan for one batch."""
        mean = self.mean
        if len(self.norms) < 2 or not math.isfinite(mean):
            return math.nan
        scale = max(map(abs, self.norms)) or 1.0  # the squares of 1e200 would overflow
        squares = math.fsum(((norm - mean) / scale) ** 2 for norm in self.norms)
        return scale * math.sqrt(squares / (len(self.norms) - 1))

    @property
    def standard_error(self) -> float:
        """The standard error of the mean: the standard deviation over √batches."""
        return self.standard_deviation / math.sqrt(len(self.norms))


@dataclass(frozen=True)
class Density:
    """An estimated spectral density: a quadrature rule, and the smooth curve drawn from it.

    `nodes` and `weights` are the rule (the weights add up to 1), `grid` and `values` the curve,
    `error` its estimated error. It took `probes` random vectors and `steps` Lanczos steps for each.
    """

    nodes: tuple[float, ...]
    weights: tuple[float, ...]
    grid: tuple[float, ...]
    values: tuple[float, ...]
    error: float
    probes: int
    steps: int


MATRICES = ["gauss-newton", "hessian"]
# The reason of the network's norm where no measurement of the network was asked for.
ONLY_BOUNDED = "network=False: only bounded, from below by the sharpest layer"


def largest_magnitude(top: Estimate, bottom: Estimate) -> Estimate:
    """Return the larger absolute value.

    It is uncertain if an uncertain end could be the larger one.
    """
    lesser, greater = sorted((top, bottom), key=lambda end: (math.isnan(end.value), abs(end.value)))
    norm = abs(greater.value)
    extent = abs(lesser.value) + lesser.error
    products = top.products + bottom.products
    if lesser.converged or extent <= norm:
        return replace(greater, value=norm, products=products)
    error = max(greater.error, extent - norm) if math.isfinite(norm) else greater.error
    return Estimate(norm, error, False, (lesser if greater.converged else greater).reason, products)


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """Activations, gradients and idle units of one layer, over all examples, positions and uses.

    `activation_mean` and `_std` are of the layer's output after its `activation` ("relu", …; ""
    without an elementwise one), `signal` the part of its root mean square that differs between
    examples, `preactivation_std` of its own output, `gradient_mean` and `_std` of the loss gradient
    with respect to the output after the activation; `weight_gradient_norm` is the weight gradient's
    Frobenius norm. `dead` is the fraction of units (channels) that a relu, relu6 or threshold keeps
    at 0 for every example and position; `saturated` that of entries where the slope of a bounded
    activation (tanh, sigmoid, …) is below 5 % of its largest. `reason` says why a value is None.
    """

    activation: str = ""
    activation_mean: float | None = None
    activation_std: float | None = None
    preactivation_std: float | None = None
    signal: float | None = field(default=None, metadata=LATER)
    gradient_mean: float | None = None
    gradient_std: float | None = None
    weight_gradient_norm: float | None = None
    dead: float | None = None
    saturated: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class JacobianBounds:
    """Norms of the Jacobians around a layer, and bounds on its Gauss-Newton norm (Theorem 2).

    `forward` is the norm of the Jacobian of the layer's input with respect to the network's,
    `backward` of the network's output with respect to the layer's output after its activation:
    means over the examples, with the largest beside them. `activation` is the largest |f'| at the
    layer's outputs, 1 without one. `rigorous_bound` has the actual input of the layer and is never
    below the norm; `paper_bound` has ‖forward‖·‖x‖ for it: no bound with biases, with f(0) ≠ 0, or
    far from 0. `reason` says why a number is None; `note` holds a remark.
    """

    forward: Estimate | None = None
    forward_largest: float | None = None
    backward: Estimate | None = None
    backward_largest: float | None = None
    activation: float | None = None
    paper_bound: float | None = None
    rigorous_bound: float | None = None
    reason: str = ""
    note: str = ""

    @property
    def converged(self) -> bool:
        return all(norm.converged for norm in (self.forward, self.backward) if norm is not None)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCurvature(NamedLayer, PlainData):
    """The curvature of the loss in one weight (or, as `report.network`, in all of them together).

    `top` and `bottom` are the largest and smallest eigenvalue, signed, of the matrix that
    `curvature` names; `approximation` is the Gauss-Newton norm beside an exact one; `aliases` are a
    tied weight's other names. `norm` is ‖H‖, the largest absolute eigenvalue; `error`, `converged`,
    `reason` and `products` are its.

    >>> top = Estimate(3.0, 0.001, True, "converged", 9)
    >>> bottom = Estimate(-4.0, 0.001, True, "converged", 0)
    >>> layer = LayerCurvature(
    ...     name="fc1", shape=(10, 4), curvature="hessian", top=top, bottom=bottom)
    >>> layer.norm, layer.top_eigenvalue, layer.products
    (4.0, 3.0, 9)
    """

    curvature: str
    top: Estimate
    bottom: Estimate
    approximation: Estimate | None = None
    trace: Estimate | None = None
    frobenius: Estimate | None = None
    eigenvalues: tuple[Estimate, ...] = ()
    density: Density | None = None
    spread: Spread | None = None
    jacobians: JacobianBounds | None = None
    diagnostics: Diagnostics | None = None
    engine: str = ""
    engine_reason: str = ""

    def __post_init__(self) -> None:
        choose("curvature", self.curvature, MATRICES)

    @property
    def estimate(self) -> Estimate:
        """The norm with its error: the end of the spectrum that is larger in absolute value."""
        return largest_magnitude(self.top, self.bottom)

    @property
    def norm(self) -> float:
        return self.estimate.value

    @property
    def error(self) -> float:
        return self.estimate.error

    @property
    def converged(self) -> bool:
        return self.estimate.converged

    @property
    def reason(self) -> str:
        return self.estimate.reason

    @property
    def products(self) -> int:
        return self.estimate.products

    @property
    def top_eigenvalue(self) -> float:
        return self.top.value

    @property
    def bottom_eigenvalue(self) -> float:
        return self.bottom.value

    @property
    def indefinite(self) -> bool:
        """Whether an eigenvalue is below 0 by more than its error and 1 % of the norm."""
        return self.bottom.value < -max(self.bottom.error, 0.01 * self.norm)

    @property
    def gap(self) -> float | None:
        """The exact norm over the Gauss-Newton one; None without the latter, 1 when both are 0."""
        if self.approximation is None:
            return None
        approximate = abs(self.approximation.value)
        if approximate:
            return self.norm / approximate
        return self.norm * math.inf if self.norm else 1.0  # inf, or nan where the norm is nan

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class OptimizerRates:
    """The advised rate of an optimizer, its stability limit, and the user's `lr`."""

    optimizer: str
    learning_rate: float
    stable_learning_rate: float
    lr: float | None = None
    converged: bool = True


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A reason why training is expected to fail: what was found, in which layers, and what helps.

    `excess` is how many times its threshold the finding is; inf where there is none.
    """

    kind: str
    layers: tuple[str, ...] = ()
    message: str
    way_out: str
    excess: float = math.inf

    def __str__(self) -> str:
        return f"{self.message} {self.way_out}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CurvatureReport(ByName[LayerCurvature], Result):
    """The curvature of every layer and of the network, with how far to trust it and what it cost.

    `findings` say why training is expected to fail: () for a sound network, None where it was not
    judged. `gradient_norm` is that of the loss gradient by the measured weights.

    >>> top = Estimate(64.0, 0.01, True, "converged", 9)
    >>> bottom = Estimate(0.0, 0.0, True, "semidefinite", 0)
    >>> rows = {"shape": (10, 4), "curvature": "gauss-newton", "top": top, "bottom": bottom}
    >>> report = CurvatureReport(
    ...     layers=(LayerCurvature(name="fc1", **rows),),
    ...     network=LayerCurvature(name="network", **rows),
    ...     curvature="gauss-newton", loss=2.3, examples=32, tolerance=1e-3, seed=0, engine="gram")
    >>> report["fc1"].norm, report.learning_rate, report.stable_learning_rate
    (64.0, 0.015625, 0.03125)
    >>> CurvatureReport.from_json(report.to_json()) == report
    True
    """

    KIND: ClassVar[str] = "hessinit curvature report"
    SCHEMA: ClassVar[int] = 3

    layers: tuple[LayerCurvature, ...]
    network: LayerCurvature
    curvature: str
    loss: float
    examples: int
    batches: int = 1
    tolerance: float
    seed: int
    engine: str
    engine_reason: str = ""
    seconds: float | None = None
    gradients: float | None = None
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    # None: the rates are those of plain gradient descent only.
    rates: OptimizerRates | None = field(default=None, metadata=LATER)
    findings: tuple[Finding, ...] | None = field(default=None, metadata=LATER)
    gradient_norm: float | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        choose("curvature", self.curvature, [*MATRICES, "both"])

    @property
    def learning_rate(self) -> float:
        """γ* = 1/‖H‖, the step of the largest guaranteed decrease; a bound where ‖H‖ is one."""
        return self.stable_learning_rate / 2

    @property
    def stable_learning_rate(self) -> float:
        """2/‖H‖: above it, gradient descent on a quadratic of this curvature diverges."""
        return 2 / self.network.norm if self.network.norm else math.inf

    @property
    def sharpest(self) -> LayerCurvature:
        """The layer with the largest norm; nan counts as the largest."""
        return max(self.layers, key=lambda layer: (math.isnan(layer.norm), layer.norm))

    @property
    def flattest(self) -> LayerCurvature:
        """The layer with the smallest norm."""
        return min(self.layers, key=lambda layer: (math.isnan(layer.norm), layer.norm))

    @property
    def network_measured(self) -> bool:
        """Whether the network was measured; with network=False the layers only bound its norm."""
        return self.network.top.reason != ONLY_BOUNDED

    @property
    def converged(self) -> bool:
        """Whether every norm, and Gauss-Newton's beside an exact one, reached the tolerance."""
        rows = (*self.layers, self.network) if self.network_measured else self.layers
        norms = [norm for row in rows for norm in (row.estimate, row.approximation)]
        return all(norm.converged for norm in norms if norm is not None)

    def advice(
        self,
        optimizer: str = "sgd",
        *,
        lr: float | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
    ) -> LearningRateAdvice:
        """Return rates for gradient descent: "sgd", "momentum" or "nesterov"."""
        from hessinit.results import advice

        name: object = optimizer  # of any type, whatever the annotation says
        if not isinstance(name, str) or name.startswith("adam"):
            raise ProblemError(
                f"a report cannot advise on {name!r}: it takes 'sgd', 'momentum' or 'nesterov', as "
                "adaptive rates need the gradient. Use hessinit.advise(model, loss, batch, "
                "optimizer=...)."
            )
        rate = advice.check_rate(lr)
        descent = advice.named_descent(optimizer, momentum, weight_decay)
        norm = descent.norm(self.network.top, self.network.bottom)
        best = descent.best(norm.value)
        say = presenter("advice")
        best_reason, stable_reason = say.explain_descent(descent, norm.value)
        return advice.LearningRateAdvice(
            optimizer=str(descent),
            lr=rate,
            learning_rate=best,
            learning_rate_reason=best_reason,
            stable_learning_rate=descent.stability_limit(norm.value),
            stable_reason=stable_reason,
            warmup=advice.untried_warmup(rate, best),
            norm=norm,
            weights=self.names,
            parameters=self.network.parameters,
            curvature=self.curvature,
            loss=self.loss,
            examples=self.examples,
            notes=(*self.notes, *say.flat_initialization(norm.value)),
            versions=self.versions,
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MeasurementPlan(Result):
    """What `plan` expects a measurement to cost.

    Only one gradient was computed and timed. `gradients` are expected, and `seconds` are these
    times `gradient_seconds`, which one gradient took. `memory` is the expected peak in bytes, with
    the model's own weights; `training_memory` is that of one gradient on the largest batch.

    >>> plan = MeasurementPlan(
    ...     engine="gram", engine_reason="few outputs", curvature="gauss-newton", layers=3,
    ...     parameters=940, examples=32, tolerance=1e-3, gradients=20.0, gradient_seconds=0.01,
    ...     memory=3_000_000, training_memory=2_000_000)
    >>> plan.seconds, plan.training_steps
    (0.2, 1.5)
    """

    KIND: ClassVar[str] = "hessinit measurement plan"

    engine: str
    engine_reason: str
    curvature: str
    layers: int
    parameters: int
    examples: int
    batches: int = 1
    tolerance: float
    gradients: float
    gradient_seconds: float
    memory: int
    training_memory: int
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.gradients * self.gradient_seconds

    @property
    def training_steps(self) -> float:
        """The expected peak memory over that of one training step without the optimizer's state."""
        return self.memory / self.training_memory
