"""The five verdicts on a curvature, and the thresholds between them (the only place they are written)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from hessinit.results.estimates import Density, Estimate, Spread
from hessinit.results.result import ByName, Plain, read_number, read_numbers, to_plain, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console, ConsoleOptions, RenderResult

    from hessinit.results.advice import LearningRateAdvice


Verdict = Literal["vanishing", "flat", "ok", "sharp", "exploding"]

# The principle is ‖H‖ ≈ 1, and the best guaranteed step of gradient descent is 1/‖H‖. So the thresholds are
# statements about steps, a decade around 1 first:
VANISHING_BELOW = 1e-3  # the best step is over 1000: the layer hardly moves the loss
FLAT_BELOW = 0.1  # the best step is 10 to 1000
SHARP_ABOVE = 10.0  # gradient descent is unstable above lr = 0.2, or less
EXPLODING_ABOVE = 1000.0  # unstable above lr = 2/1000 = 0.002, which is under the rates in common use


def judge(norm: float) -> Verdict:
    """Say in one word what a curvature norm means for the first step; a threshold itself is the milder word.

    >>> [judge(norm) for norm in (0.0, 0.05, 1.0, 64.0, float("inf"))]
    ['vanishing', 'flat', 'ok', 'sharp', 'exploding']
    """
    if math.isnan(norm) or norm > EXPLODING_ABOVE:
        return "exploding"
    if norm > SHARP_ABOVE:
        return "sharp"
    if norm >= FLAT_BELOW:
        return "ok"
    return "flat" if norm >= VANISHING_BELOW else "vanishing"


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """One layer's numbers over all examples, positions and uses; None where there is nothing to say.

    `activation_mean` and `_std` are of what the layer gives on: after its `activation` ("relu", "tanh", …) if
    an elementwise one follows, directly or behind a normalization, else ("") its own output.
    `preactivation_std` is of its own output, with its bias. `gradient_mean` and `_std` are of the loss
    gradient by what it gives on, and `weight_gradient_norm` is the Frobenius norm of the loss gradient by the
    weight.

    `dead` is the share of units (channels of convolutions) that give 0 for every example and position: of
    activations that are flat at 0 (relu, relu6, threshold). `saturated` is the share of entries where the
    slope of a bounded activation (tanh, sigmoid, hardtanh, hardsigmoid, erf) is below 5 % of its largest.

    `correlation` asks whether the loss gradient by an output depends on that output's gradient by a unit of
    the layer, over examples: the root mean square of Pearson's r over `pairs` pairs of an output and a unit.
    `correlated` is the share of pairs that are significant at 5 %, so 0.05 is what independence gives.
    `reason` says why something is None.
    """

    activation: str = ""
    activation_mean: float | None = None
    activation_std: float | None = None
    preactivation_std: float | None = None
    gradient_mean: float | None = None
    gradient_std: float | None = None
    weight_gradient_norm: float | None = None
    dead: float | None = None
    saturated: float | None = None
    correlation: float | None = None
    correlated: float | None = None
    pairs: int = 0
    reason: str = ""


_NUMBERS = (
    "activation_mean", "activation_std", "preactivation_std", "gradient_mean", "gradient_std",
    "weight_gradient_norm", "dead", "saturated", "correlation", "correlated",
)  # fmt: skip


def read_diagnostics(data: Plain) -> Diagnostics:
    """Rebuild diagnostics from what `to_plain` made of them.

    >>> from hessinit.results.result import to_plain
    >>> diagnostics = Diagnostics(activation="relu", dead=0.25, gradient_std=float("inf"))
    >>> read_diagnostics(to_plain(diagnostics)) == diagnostics
    True
    """
    return Diagnostics(
        activation=str(data["activation"]),
        pairs=int(data["pairs"]),
        reason=str(data["reason"]),
        **{name: None if data[name] is None else read_number(data[name]) for name in _NUMBERS},
    )


@dataclass(frozen=True)
class JacobianBounds:
    """‖J…J‖ before and after a layer, and what they say about its Gauss-Newton norm (Theorem 2).

    `forward` is the norm of the layer's input by the network's, `backward` of the network's output by what
    the layer gives behind its activation: means over the examples, with the largest beside them.
    `activation` is the largest |f'| at the layer's own outputs, 1 without an activation.

    `rigorous_bound` is never below the norm: ‖backward‖, ‖activation‖ and the actual input of the layer.
    `paper_bound` has ‖forward‖·‖x‖ for that input: no bound in the presence of biases, of activations with
    f(0) ≠ 0, or far from 0. `lipschitz_bound` is the naive product of the norms of all other layers and ‖x‖,
    with the same gaps. A number that is
    None has its `reason`, the last of them `lipschitz_reason`; `note` says what else to know.

    >>> one = Estimate(1.0, 0.0, True, "exact", 3)
    >>> layer = JacobianBounds(one, 1.0, one, 1.0, 1.0, 2.0, 2.0, 8.0)
    >>> layer == read_products({**vars(layer), "forward": vars(one), "backward": vars(one)})
    True
    """

    forward: Estimate | None
    forward_largest: float | None
    backward: Estimate | None
    backward_largest: float | None
    activation: float | None
    paper_bound: float | None
    rigorous_bound: float | None
    lipschitz_bound: float | None
    reason: str = ""
    lipschitz_reason: str = ""
    note: str = ""

    @property
    def converged(self) -> bool:
        """Whether both products reached the tolerance; those that are missing do not count."""
        return all(one.converged for one in (self.forward, self.backward) if one is not None)


def no_products(reason: str) -> JacobianBounds:
    """For a layer that has none."""
    return JacobianBounds(None, None, None, None, None, None, None, None, reason, reason)


def read_products(data: Plain) -> JacobianBounds:
    """Rebuild the products from plain data."""

    return JacobianBounds(
        forward=read_if_there(read_estimate, data["forward"]),
        forward_largest=read_if_there(read_number, data["forward_largest"]),
        backward=read_if_there(read_estimate, data["backward"]),
        backward_largest=read_if_there(read_number, data["backward_largest"]),
        activation=read_if_there(read_number, data["activation"]),
        paper_bound=read_if_there(read_number, data["paper_bound"]),
        rigorous_bound=read_if_there(read_number, data["rigorous_bound"]),
        lipschitz_bound=read_if_there(read_number, data["lipschitz_bound"]),
        reason=str(data["reason"]),
        lipschitz_reason=str(data["lipschitz_reason"]),
        note=str(data["note"]),
    )


MATRICES = ("gauss-newton", "hessian")
# The reason that stands in place of a measurement of the network where none was asked for.
ONLY_BOUNDED = "network=False: only bounded, from below by the sharpest layer"


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCurvature:
    """The curvature of the loss in one weight (or, as `report.network`, in all of them together).

    `top` and `bottom` are the largest and smallest eigenvalue, signed, of the matrix that `curvature` names;
    `approximation` is the Gauss-Newton norm beside an exact one; `aliases` are a tied weight's other names.
    `jacobians` and `diagnostics` are there when they were asked for.

    >>> top, bottom = Estimate(3.0, 0.001, True, "converged", 9), Estimate(-4.0, 0.001, True, "converged", 0)
    >>> layer = LayerCurvature(name="fc1", shape=(10, 4), curvature="hessian", top=top, bottom=bottom)
    >>> layer.norm, layer.top_eigenvalue, layer.products, layer.verdict
    (4.0, 3.0, 9, 'ok')
    """

    name: str
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...]
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
        check_choice("curvature", self.curvature, MATRICES)

    # Compared in plain form, where nan is the text "nan": a report with a nan in it equals its own copy.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerCurvature):
            return NotImplemented
        return bool(to_plain(self) == to_plain(other))

    def __hash__(self) -> int:
        return hash((self.name, self.aliases, self.shape, self.curvature))

    @property
    def estimate(self) -> Estimate:
        """The norm: the end of the spectrum that is larger in absolute value.

        Both ends are needed to know it, so it costs the products of both, and an end that is still uncertain
        leaves the norm uncertain if it could be the larger one.
        """
        ends = sorted((self.top, self.bottom), key=lambda end: _nan_last(abs(end.value)))
        lesser, greater = ends
        norm = abs(greater.value)
        products = self.top.products + self.bottom.products
        reach = abs(lesser.value) + lesser.error
        if not lesser.converged and not reach <= norm:
            error = max(greater.error, reach - norm) if math.isfinite(norm) else greater.error
            blamed = lesser if greater.converged else greater
            return Estimate(norm, error, False, blamed.reason, products)
        return replace(greater, value=norm, products=products)

    @property
    def norm(self) -> float:
        """‖H‖: the largest absolute eigenvalue."""
        return self.estimate.value

    @property
    def error(self) -> float:
        """The absolute error of the norm."""
        return self.estimate.error

    @property
    def converged(self) -> bool:
        """Whether the norm reached the tolerance."""
        return self.estimate.converged

    @property
    def reason(self) -> str:
        """Why the computation of the norm stopped, and what to try if it did not converge."""
        return self.estimate.reason

    @property
    def products(self) -> int:
        """Matrix-vector products spent on the norm."""
        return self.estimate.products

    @property
    def top_eigenvalue(self) -> float:
        """The largest eigenvalue, signed."""
        return self.top.value

    @property
    def bottom_eigenvalue(self) -> float:
        """The smallest eigenvalue, signed."""
        return self.bottom.value

    @property
    def indefinite(self) -> bool:
        """Whether the loss curves down by more than the error and by more than 1 % of the norm."""
        return self.bottom.value < -max(self.bottom.error, 0.01 * self.norm)

    @property
    def gap(self) -> float | None:
        """The exact norm over the Gauss-Newton one; None without the latter, 1 when both are 0."""
        if self.approximation is None:
            return None
        exact, approximate = self.norm, abs(self.approximation.value)
        if approximate == 0:
            return math.nan if math.isnan(exact) else 1.0 if exact == 0 else math.inf
        return exact / approximate

    @property
    def verdict(self) -> Verdict:
        """One of vanishing, flat, ok, sharp, exploding; `report/verdict.py` says where each begins."""
        return judge(self.norm)

    @property
    def parameters(self) -> int:
        """How many numbers the weight holds."""
        return math.prod(self.shape)


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    near = get_close_matches(str(value), choices, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{what}={value!r} is unknown; choose from {', '.join(map(repr, choices))}.{hint}")


def _nan_last(number: float) -> tuple[bool, float]:
    return math.isnan(number), number


Something = TypeVar("Something")


def read_estimate(data: Plain) -> Estimate:
    return Estimate(
        value=read_number(data["value"]),
        error=read_number(data["error"]),
        converged=bool(data["converged"]),
        reason=str(data["reason"]),
        products=int(data["products"]),
    )


def read_density(data: Plain) -> Density:
    return Density(
        nodes=read_numbers(data["nodes"]),
        weights=read_numbers(data["weights"]),
        grid=read_numbers(data["grid"]),
        values=read_numbers(data["values"]),
        error=read_number(data["error"]),
        probes=int(data["probes"]),
        steps=int(data["steps"]),
    )


def read_spread(data: Plain) -> Spread:
    return Spread(read_numbers(data["norms"]))


def read_layer(data: Plain) -> LayerCurvature:
    return LayerCurvature(
        name=str(data["name"]),
        aliases=tuple(map(str, data["aliases"])),
        shape=tuple(map(int, data["shape"])),
        curvature=str(data["curvature"]),
        top=read_estimate(data["top"]),
        bottom=read_estimate(data["bottom"]),
        approximation=read_if_there(read_estimate, data["approximation"]),
        trace=read_if_there(read_estimate, data["trace"]),
        frobenius=read_if_there(read_estimate, data["frobenius"]),
        eigenvalues=tuple(map(read_estimate, data["eigenvalues"])),
        density=read_if_there(read_density, data["density"]),
        spread=read_if_there(read_spread, data["spread"]),
        jacobians=read_if_there(
            read_products, data.get("jacobians")
        ),  # files of the first versions lack them
        diagnostics=read_if_there(read_diagnostics, data.get("diagnostics")),
        engine=str(data["engine"]),
        engine_reason=str(data["engine_reason"]),
    )


def read_if_there(read: Callable[[Plain], Something], data: Plain) -> Something | None:
    return None if data is None else read(data)


SCHEMA = 2
KIND = "hessinit curvature report"


def to_present_schema(data: Plain, source: str) -> Plain:
    """Check that `data` is a report and bring it to the present schema; messages call it `source`."""
    if not isinstance(data, dict) or "layers" not in data or type(data.get("schema")) is not int:
        found = f"an object with {_some(data)}" if isinstance(data, dict) else f"a {type(data).__name__}"
        raise ValueError(
            f"{source} is not a hessinit report: it holds {found}, and a report is an object with "
            "'schema' (a whole number) and 'layers'. Give a file that report.save() wrote."
        )
    if data.get("kind", KIND) != KIND:
        raise ValueError(f"{source} holds {data['kind']!r}, and a curvature report is wanted here.")
    schema = data["schema"]
    if schema > SCHEMA:
        raise ValueError(
            f"{source} has report schema {schema}, and this hessinit reads up to {SCHEMA}: it comes from a "
            "newer version. Upgrade with `pip install --upgrade hessinit`, or measure again."
        )
    if schema < 1:
        raise ValueError(
            f"{source} has report schema {schema}; schemas start at 1. Was the file edited? Measure again."
        )
    for older in range(schema, SCHEMA):
        data = MIGRATIONS[older](data)
    return data


def from_schema_1(data: Plain) -> Plain:
    """Schema 1 had flat numbers with one error for both ends, and no approximation, spread or notes."""

    def lift(layer: Plain) -> Plain:
        def estimate(value: Plain, products: int) -> Plain:
            shared = {key: layer[key] for key in ("error", "converged", "reason")}
            return {"value": value, "products": products, **shared}

        absent = dict.fromkeys(("approximation", "trace", "frobenius", "density", "spread"))
        lifted = {key: value for key, value in layer.items() if key != "norm"}
        ends = {"top": estimate(layer["top"], layer["products"]), "bottom": estimate(layer["bottom"], 0)}
        return {**absent, "eigenvalues": [], "aliases": [], **lifted, **ends}

    layers, network = [lift(layer) for layer in data["layers"]], lift(data["network"])
    return {**data, "schema": 2, "kind": KIND, "layers": layers, "network": network, "notes": []}


MIGRATIONS: dict[int, Callable[[Plain], Plain]] = {1: from_schema_1}


def _some(data: dict[str, Plain]) -> str:
    shown = ", ".join(repr(key) for key in list(data)[:5])
    return f"the keys {shown}{', …' if len(data) > 5 else ''}" if data else "no keys"


# `present` is imported inside the methods only: it imports this module, and measuring needs none of it.


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CurvatureReport(ByName[LayerCurvature]):
    """The curvature of every layer and of the network, with how far to trust it and what it cost.

    It is plain data: it needs no model and no torch, saves to JSON and loads back equal.

    >>> from hessinit.present.example import example_report
    >>> report = example_report()
    >>> report["fc3"].norm, report.network.norm, report.learning_rate
    (64.0, 64.5, 0.015503875968992248)
    >>> CurvatureReport.from_json(report.to_json()) == report
    True
    """

    schema: ClassVar[int] = SCHEMA

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

    def __post_init__(self) -> None:
        check_choice("curvature", self.curvature, (*MATRICES, "both"))

    # Compared in plain form, where nan is the text "nan": a report with a nan in it equals its own copy.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CurvatureReport):
            return NotImplemented
        return bool(self.to_dict() == other.to_dict())

    def __hash__(self) -> int:
        return hash((self.layers, self.network, self.curvature, self.examples, self.seed))

    @property
    def learning_rate(self) -> float:
        """γ* = 1/‖H‖, the step of the largest guaranteed decrease; inf when ‖H‖ is 0, 0 when it is inf.

        Without `network_measured`, ‖H‖ is a lower bound, and this an upper one: it guarantees nothing.
        """
        return self.stable_learning_rate / 2

    @property
    def stable_learning_rate(self) -> float:
        """2/‖H‖, above which gradient descent of the measured weights leaves a bowl of this curvature."""
        return 2 / self.network.norm if self.network.norm else math.inf

    @property
    def sharpest(self) -> LayerCurvature:
        """The layer with the largest norm; nan counts as the largest."""
        return max(self._measured(), key=_by_norm)

    @property
    def flattest(self) -> LayerCurvature:
        """The layer with the smallest norm."""
        return min(self._measured(), key=_by_norm)

    @property
    def network_measured(self) -> bool:
        """Whether the network was measured; with network=False its norm is only bounded by the layers'."""
        return self.network.top.reason != ONLY_BOUNDED

    @property
    def converged(self) -> bool:
        """Whether every norm asked for reached the tolerance; for curvature="both", Gauss-Newton's too."""
        rows = (*self.layers, self.network) if self.network_measured else self.layers
        approximations = [row.approximation for row in rows if row.approximation is not None]
        return all(estimate.converged for estimate in (*(row.estimate for row in rows), *approximations))

    @property
    def verdict(self) -> str:
        """What the numbers mean, in a few sentences."""
        from hessinit.present.diagnostics_sentences import conclude_diagnostics
        from hessinit.present.products_columns import conclude_products
        from hessinit.present.sentences import conclude

        return " ".join(filter(None, (conclude(self), conclude_products(self), conclude_diagnostics(self))))

    def advice(
        self,
        optimizer: str = "sgd",
        *,
        lr: float | None = None,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
    ) -> LearningRateAdvice:
        """Rates for gradient descent ("sgd", "momentum", "nesterov"), and whether to warm up to `lr`.

        Adam's depend on the gradient, too: `hessinit.advise` measures them.
        """
        from hessinit.results.advice import advise_from_report

        return advise_from_report(self, optimizer, lr, momentum, dampening, weight_decay)

    def to_dict(self) -> dict[str, Plain]:
        """The report as what strict JSON can hold."""
        return {"kind": KIND, "schema": SCHEMA, **to_plain(self)}

    def to_json(self) -> str:
        """The report as strict JSON; `from_json` gives an equal one back."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Plain, *, source: str = "the data") -> CurvatureReport:
        """Rebuild a report of this or an older schema; unknown keys are ignored."""
        try:
            data = to_present_schema(data, source)
        except (KeyError, TypeError, AttributeError) as problem:
            raise _broken(source, problem) from problem
        try:
            return cls(
                layers=tuple(map(read_layer, data["layers"])),
                network=read_layer(data["network"]),
                curvature=str(data["curvature"]),
                loss=read_number(data["loss"]),
                examples=int(data["examples"]),
                batches=int(data["batches"]),
                tolerance=read_number(data["tolerance"]),
                seed=int(data["seed"]),
                engine=str(data["engine"]),
                engine_reason=str(data["engine_reason"]),
                seconds=read_if_there(read_number, data["seconds"]),
                gradients=read_if_there(read_number, data["gradients"]),
                notes=tuple(map(str, data["notes"])),
                versions={str(key): str(value) for key, value in data["versions"].items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as problem:
            raise _broken(source, problem) from problem

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "the text") -> CurvatureReport:
        """Rebuild a report from what `to_json` gave."""
        try:
            data = json.loads(text)
        except ValueError as problem:
            raise ValueError(
                f"{source} is not JSON ({problem}). Give a file that report.save() wrote."
            ) from problem
        return cls.from_dict(data, source=source)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, whole or not at all; `hessinit.load` reads it."""
        write_text(path, self.to_json())

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one web page that needs nothing else: charts to hover over, a table to sort."""
        from hessinit.present.page.curvature import curvature_page
        from hessinit.present.page.render import render_page

        write_text(path, render_page(curvature_page(self)))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the norms over depth, on `ax` or a new figure; `plt.show()` or `savefig` is up to you."""
        from hessinit.present.figure import draw_norms

        return draw_norms(self, ax)

    def plot_jacobians(self, axes: Sequence[Axes] | None = None) -> tuple[Axes, Axes]:
        """Draw the Jacobian products over depth, and ‖H‖ beside its bounds; on two axes, or new ones."""
        from hessinit.present.products_figure import draw_products

        return draw_products(self, axes)

    def plot_diagnostics(self, ax: Axes | None = None) -> Axes:
        """Draw the size of activations and gradients over depth, dead and saturated units as bars."""
        from hessinit.present.diagnostics_figure import draw_diagnostics

        return draw_diagnostics(self, ax)

    def plot_spectrum(self, layer: str = "network", ax: Axes | None = None) -> Axes:
        """Draw the spectral density and the largest eigenvalues of a layer, where they were asked for."""
        from hessinit.present.spectrum_figure import draw_spectrum

        return draw_spectrum(self, layer, ax)

    def __repr__(self) -> str:
        norm = f"{self.network.norm:.3g}"
        return f"<CurvatureReport of {len(self)} layers: curvature={self.curvature!r}, network.norm={norm}>"

    def __str__(self) -> str:
        from hessinit.present.table import render_text

        return render_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from hessinit.present.table import renderables

        yield from renderables(self, options.max_width)

    def _repr_html_(self) -> str:
        from hessinit.present.html import render_fragment

        return render_fragment(self)

    def _measured(self) -> tuple[LayerCurvature, ...]:
        if not self.layers:
            raise ValueError(
                "the report has no layers, so none is the sharpest or flattest; measure some first."
            )
        return self.layers


def _by_norm(layer: LayerCurvature) -> tuple[bool, float]:
    return math.isnan(layer.norm), layer.norm


def _broken(source: str, problem: Exception) -> ValueError:
    what = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
    return ValueError(f"{source} is not a whole report: {what}. Was the file edited or cut? Measure again.")
