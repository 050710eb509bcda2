"""A model whose weights are scaled from a base, its output and norms there, and the scaling paths.

A path says which weights the one number of rule="network" scales, and by which power. A weight that
a normalization follows does not change what the network computes, however it is scaled: no path
moves it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.autograd.functional import vhp
from torch.nn.utils import parametrize

from hessinit.curvature import engines
from hessinit.curvature.evaluation import Evaluation, evaluate
from hessinit.errors import WeightsError
from hessinit.init import defaults
from hessinit.init.trace import WeightUse, parametrized_name
from hessinit.init.weights import Target
from hessinit.measurement.facts import in_running_order, note_uncounted, notes_on
from hessinit.measurement.loss_range import LossRange, find_loss_range
from hessinit.measurement.rows import Rows
from hessinit.problem.batches import Batch
from hessinit.problem.functional import FunctionalProblem, ProblemOptions
from hessinit.problem.problem import Loss, Problem
from hessinit.problem.validate import Layer, all_finite, layer_name
from hessinit.results.curvature_report import CurvatureReport

Measured = TypeVar("Measured")

TOLERANCE = 1e-3
EXPENSIVE_TOLERANCE = 5e-3
# Every block costs the Lanczos engine a dozen products of one to two gradients.
_FEW_BLOCKS = 3
# Backward passes, one for each output, that the Gram engine may take: a Lanczos run costs about as
# much.
_FEW_OUTPUTS = 40
# How far the output of a homogeneous network may be from what its powers say, per weight.
_ROUNDING = 1e-3


@dataclass
class ProblemFactory:
    """Builds the problem for the present weights; `check` asks to check the derivatives once."""

    model: nn.Module
    loss: Loss
    batch: Any
    options: ProblemOptions
    curvature: str
    check: bool
    old: dict[tuple[bool, bool], Any] = field(
        default_factory=dict
    )  # what was measured at the user's weights
    norms: dict[tuple[Any, ...], float] = field(default_factory=dict)  # by a digest of the weights
    _first: FunctionalProblem | None = None

    def problem(self, measured: bool = False) -> FunctionalProblem:
        """The first problem to be `measured` has its derivatives checked."""
        check = measured and self.check
        self.check = self.check and not measured
        if self._first is not None:
            return self._first.at_present_weights(check)
        options: ProblemOptions = {**self.options, "check": check}
        found = FunctionalProblem(Problem(self.model, self.loss, self.batch, **options))
        # To write through a parametrization may exchange tensors; without, the values alone change.
        if not any(map(parametrize.is_parametrized, self.model.modules())):
            self._first = found
        return found

    def digest(self) -> bytes:
        found = hashlib.sha256()
        for one in self.model.parameters():
            found.update(
                one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        return found.digest()

    @functools.cached_property
    def loss_range(self) -> LossRange:
        """What the loss can be; it does not depend on the weights."""
        problem = self.problem()
        with problem.settings(), torch.enable_grad():
            output = problem.output(problem.batches[0])
            like = [batch for batch in problem.batches if batch.size == problem.batches[0].size]
            return find_loss_range(problem.loss_of, output, like)

    @property
    def sample(self) -> Any:
        return self.batch[0] if isinstance(self.batch, tuple) else self.batch[0][0]


@dataclass(frozen=True)
class OutputStatistics:
    """The loss, the root mean square of the output, and the loss of a zero output, from one forward."""

    loss: float
    size: float
    zero_loss: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.size)


NOT_FINITE = OutputStatistics(math.inf, math.inf, math.inf)


def _once_per_scale(method: Callable[[ScaledModel], Measured]) -> Callable[[ScaledModel], Measured]:
    @functools.wraps(method)
    def remembered(model: ScaledModel) -> Measured:
        key = (method.__name__, *model.scales.values())
        if key not in model.known:
            model.known[key] = method(model)
        return cast(Measured, model.known[key])

    return remembered


class ScaledModel:
    """The present weights are the base; `scale_` multiplies the base, never an earlier scale."""

    def __init__(
        self, factory: ProblemFactory, targets: Sequence[Target], tolerance: float
    ) -> None:
        self.factory = factory
        self._tolerance = tolerance
        self._base = {
            target.name: (target, target.value.clone(), target.snapshot()) for target in targets
        }
        self.scales = dict.fromkeys(self._base, 1.0)
        self.known: dict[tuple[Any, ...], Any] = {}
        self._measured: (
            tuple[dict[str, float], list[Evaluation], dict[tuple[str, float], Rows]] | None
        ) = None

    def scale_(self, logs: Mapping[str, float]) -> None:
        """Write base × exp(log); weights that are not named return to their base."""
        for name, (target, base, restore) in self._base.items():
            factor = math.exp(min(logs.get(name, 0.0), 700.0))
            if factor == 1.0 != self.scales[name]:
                restore()  # through a parametrization the base would come back only rounded
            elif factor != self.scales[name]:
                target.write_(base * factor)
            self.scales[name] = factor

    def unscalable(self) -> list[str]:
        """The weights whose parametrization removes their scale, as a spectral norm does."""
        found = []
        for name, (target, base, restore) in self._base.items():
            if target.is_parametrized:
                target.write_(base * 1.5)
                if not bool((target.value - base * 1.5).abs().max() <= 1e-2 * base.abs().max()):
                    found.append(name)
                restore()
        return found

    def loss_unit(self, *others: float) -> float:
        """How far the loss of a zero output, or one of `others`, is above the lowest; inf where not known.

        The best constant output stands for a zero output where the network's own is not finite.
        """
        losses = [loss for loss in (self.output().zero_loss, *others) if loss < math.inf]
        unit = max([self.factory.loss_range.constant, *losses]) - self.factory.loss_range.free
        return unit if unit > 0 else math.inf

    @_once_per_scale
    def output(self) -> OutputStatistics:
        """One forward; not finite is a result, not an error."""
        try:
            problem = self.factory.problem()
        except WeightsError:  # some are not finite
            return NOT_FINITE
        with problem.settings():
            found = [_output_statistics(problem, batch) for batch in problem.batches]
        shares = [batch.rows / problem.rows for batch in problem.batches]
        pairs = list(zip(found, shares, strict=True))
        return OutputStatistics(
            sum(one.loss * weight for one, weight in pairs),
            math.sqrt(sum(one.size**2 * weight for one, weight in pairs)),
            sum(one.zero_loss * weight for one, weight in pairs),
        )

    def loss_is_quadratic(self) -> bool:
        """Whether the loss has the same second derivative at twice the output: a softmax has not."""
        problem = self.factory.problem()
        with problem.settings(), torch.enable_grad():
            batch = problem.batches[0]
            output = problem.output(batch).detach()
            places = [factor * output for factor in (0.5, 1.0, 2.0)]
            found = [
                vhp(lambda one: problem.loss_of(one, batch), place, output)[1] for place in places
            ]
        return bool(found[0].any()) and all(
            torch.allclose(found[0], one, rtol=1e-3) for one in found
        )

    @_once_per_scale
    def network_norm(self) -> float:
        """‖H‖ of all measured weights, to the search's tolerance; inf where it is not finite."""
        if not self.output().is_finite:
            return math.inf
        with self._measuring(every_layer=False) as rows:
            return finite_or_inf(rows.whole.norm.value)

    def own_norm(self, name: str) -> float:
        with self._measuring(every_layer=False) as rows:
            own = [layer.parameter for layer in rows.problem.layers if _weight_name(layer) == name]
            return finite_or_inf(rows.main.extremes(own).norm.value) if own else 0.0

    @_once_per_scale
    def layer_norms(self) -> dict[str, float]:
        """‖H‖ of every weight; of the sharper part where a parametrization makes it of several."""
        with self._measuring(every_layer=True) as rows:
            layers = rows.problem.layers
            extremes = rows.main.extremes_of_each([layer.parameter for layer in layers])
            found: dict[str, float] = {}
            for layer in layers:
                name = _weight_name(layer)
                norm = finite_or_inf(extremes[layer.parameter].norm.value)
                found[name] = max(found.get(name, 0.0), norm)
            return found

    @contextlib.contextmanager
    def _measuring(self, every_layer: bool, reported: bool = False) -> Iterator[Rows]:
        """The engine at the present scales; kept until they change, for its graphs take the memory."""
        if self._measured is None or self._measured[0] != self.scales:
            self._measured = None
            problem = self.factory.problem(measured=True)
            with problem.settings():
                self._measured = dict(self.scales), evaluate(problem), {}
        _, evaluations, known = self._measured
        problem = evaluations[0].problem
        curvature = self.factory.curvature
        estimator = "auto" if every_layer else network_estimator(evaluations)
        tolerance = EXPENSIVE_TOLERANCE if reported else self._tolerance
        # Few outputs make further steps cheap, and at 1 % a search may settle on the second value.
        if estimator == "auto" and (reported or curvature == "gauss-newton"):
            tolerance = TOLERANCE
        with problem.settings():
            if (estimator, tolerance) not in known:
                settings = engines.LanczosSettings(tolerance, 200, problem.seed)
                known[estimator, tolerance] = Rows(
                    problem, evaluations, curvature, estimator, settings
                )
            yield known[estimator, tolerance]

    def report(self, every_layer: bool) -> CurvatureReport:
        """As `measure` makes it; layers only where asked for, where few, and by the Gram engine."""
        started = time.perf_counter()
        curvature = self.factory.curvature
        with self._measuring(every_layer, reported=True) as rows:
            problem = rows.problem
            evaluations = rows.evaluations
            names = [layer.parameter for layer in problem.layers]
            cheap = rows.main.is_cheap(names) or len(names) <= _FEW_BLOCKS
            layers: tuple[LayerCurvature, ...] = ()
            if every_layer or cheap:
                layers = tuple(rows.layers(in_running_order(problem, evaluations)).values())
            network = rows.network()
            notes = [*notes_on(problem, evaluations), *note_uncounted(problem)]
            if not layers:
                notes.append("The layers were not measured one by one; report=True measures them.")
            seconds = time.perf_counter() - started
            report = replace(rows.report(layers, network), notes=tuple(notes), seconds=seconds)
            if layers:
                return report
            return replace(report, engine_reason="the network's norm alone was measured")


def network_estimator(evaluations: Sequence[Evaluation]) -> str:
    """The cheaper way to the network's norm alone; the engines choose by the cost of all layers."""
    outputs = max(one.output[0].numel() if one.output.ndim else 1 for one in evaluations)
    return "auto" if outputs <= _FEW_OUTPUTS else "lanczos"


def _output_statistics(problem: FunctionalProblem, batch: Batch) -> OutputStatistics:
    with torch.enable_grad():  # for a forward that differentiates by its inputs
        output = problem.output(batch).detach()
    if not all_finite(output):
        return NOT_FINITE
    with torch.no_grad():
        loss = float(problem.loss_of(output, batch))
        try:
            zero_loss = float(problem.loss_of(torch.zeros_like(output), batch))
        except Exception:  # a loss that is not defined for zeros, as one that divides by a length
            zero_loss = math.nan
    return OutputStatistics(loss, float(output.double().square().mean().sqrt()), zero_loss)


def _weight_name(layer: Layer) -> str:
    return layer_name(parametrized_name(layer.parameter))


def finite_or_inf(norm: float) -> float:
    return norm if math.isfinite(norm) else math.inf


@dataclass(frozen=True)
class ScalingPath:
    """At the number `t`, the log of a weight's factor is its offset plus `t` times its exponent.

    `pace` is how fast log λ grows with `t` where the size of the output does not tell.
    """

    name: str
    exponents: Mapping[str, float]
    offsets: Mapping[str, float] = field(default_factory=dict)
    pace: float | None = None

    def logs(self, t: float) -> dict[str, float]:
        return {
            name: self.offsets.get(name, 0.0) + t * power for name, power in self.exponents.items()
        }


def scaling_path(
    scaling: str,
    targets: Sequence[Target],
    uses: Sequence[WeightUse],
    model: ScaledModel,
    target: float,
    nearly: bool = False,
) -> ScalingPath:
    """The path of one of `defaults.SCALINGS`.

    "all": one gain for all weights that matter. "last": the weights whose result is the output, or
    else the one that runs last. "small-output", for homogeneous networks (for others it is "last"):
    the largest weight so small that the output is small, all others larger. A weight's own
    curvature does not depend on its own size, only on that of the others. So the largest one gets
    as sharp as `target`, a norm, allows, and its initial size is next to nothing. Where branches
    are added, scaling them would change their proportions: the first weight on the trunk is the
    small one, and those of the output grow. With `nearly`, a chain without residual branches counts
    as homogeneous whatever its activations.
    """
    effective, last = effective_and_last(targets, uses)
    if scaling == "all":
        return ScalingPath("all", dict.fromkeys(effective, 1.0))
    found = small_and_large(targets, uses, model, nearly) if scaling == "small-output" else None
    if found is None:
        return ScalingPath("last", dict.fromkeys(last, 1.0))
    small, large, size = found
    # The network is about as sharp as that weight alone will be, and that follows from its norm
    # now.
    own = model.own_norm(small)
    first = math.log(target / own) / (2 * len(large)) if 0 < own < math.inf else 0.0
    offset = math.log(defaults.SMALL_OUTPUT / size) - first * len(large)
    powers = dict.fromkeys(large, 1.0) | {small: -float(len(large))}
    offsets = dict.fromkeys(large, first) | {small: offset}
    return ScalingPath("small-output", powers, offsets, pace=2.0 * len(large))


def small_and_large(
    targets: Sequence[Target], uses: Sequence[WeightUse], model: ScaledModel, nearly: bool = False
) -> tuple[str, list[str], float] | None:
    """The weight to make small, those to enlarge, and the output's size; None if not homogeneous."""
    effective, last = effective_and_last(targets, uses)
    last = [name for name in last if name in effective]
    inner = [name for name in effective if name not in last]
    size = model.output().size
    if not last or not inner or not 0 < size < math.inf:
        return None
    if not any(use.closes_residual for use in uses):
        entries = {target.name: target.value.numel() for target in targets}
        small = max(inner, key=entries.__getitem__)
        whole = nearly or _is_proportional(model, size, dict.fromkeys(effective, -math.log(2.0)))
        return (small, [name for name in effective if name != small], size) if whole else None
    names = {target.key: target.name for target in targets}
    running = list(dict.fromkeys(names[use.parameter] for use in uses if use.parameter in names))
    for name in (one for one in running if one in inner):
        if _is_proportional(model, size, {name: -math.log(4.0)}):
            return name, last, size
    return None


def _is_proportional(model: ScaledModel, size: float, logs: Mapping[str, float]) -> bool:
    model.scale_(logs)
    found = model.output().size
    model.scale_({})
    expected = size * math.exp(sum(logs.values()))
    return abs(found / expected - 1) < _ROUNDING * len(logs) if expected > 0 else False


def effective_and_last(
    targets: Sequence[Target], uses: Sequence[WeightUse]
) -> tuple[list[str], list[str]]:
    """The weights whose scale no normalization undoes, and those that make the output."""
    names = {target.key: target.name for target in targets}
    if not uses:
        return list(names.values()), list(names.values())[-1:]
    known = [use for use in uses if use.parameter in names]
    matter = {use.parameter for use in known if not use.norm_follows}
    last = [use.parameter for use in known if use.downstream.end == "output"]
    if not last:  # two heads that are joined, say: the latest weights that end in the same way
        running = [use for use in known if use.parameter in matter]
        end = running[-1].downstream.end if running else ""
        latest = itertools.takewhile(lambda use: use.downstream.end == end, reversed(running))
        last = [use.parameter for use in (list(latest)[::-1] if end == "cat" else running[-1:])]
    return [names[key] for key in names if key in matter], [
        names[key] for key in dict.fromkeys(last)
    ]
