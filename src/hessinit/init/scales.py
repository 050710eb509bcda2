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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.functional import vhp
from torch.nn.utils import parametrize

from hessinit.curvature.engine import LanczosSettings
from hessinit.curvature.engine_choice import evaluate_everywhere, functional_form
from hessinit.curvature.evaluation import Evaluation
from hessinit.errors import WeightsError
from hessinit.init.options import SCALING
from hessinit.init.trace import WeightUse, parametrized_name
from hessinit.init.weights import Target
from hessinit.measurement.facts import in_running_order, note_uncounted, notes_on
from hessinit.measurement.loss_range import LossRange, find_loss_range
from hessinit.measurement.measure import Rows
from hessinit.problem.batches import Batch
from hessinit.problem.checks import Layer, all_finite, layer_name, unwrap
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.problem import Problem
from hessinit.problem.ranks import lockstep_ranks, mean_over_ranks, on_any_rank
from hessinit.problem.shards import local_part
from hessinit.results.curvature_report import CurvatureReport, LayerCurvature

Remembered = TypeVar("Remembered")


@dataclass(frozen=True)
class NormAccuracy:
    """How exactly norms are measured, by what it costs (benchmarks/initialize_cost.py)."""

    # Where few outputs make further Lanczos steps cheap, and where they are not.
    cheap_tolerance: float = 1e-3
    expensive_tolerance: float = 5e-3
    # Every block costs the Lanczos engine a dozen products of one to two gradients.
    most_blocks: int = 3
    # Backward passes, one an output, that the Gram engine may take: what a Lanczos run costs.
    most_outputs: int = 40
    max_iterations: int = 200


NORM_ACCURACY = NormAccuracy()


class Memory(dict[Hashable, Any]):
    """What was measured once, by a key."""

    def once(self, key: Hashable, measure: Callable[[], Remembered]) -> Remembered:
        """What `measure` returned when this key was first met."""
        if key not in self:
            self[key] = measure()
        return cast(Remembered, self[key])


@dataclass
class ProblemFactory:
    """Builds the problem for the present weights, and keeps what is measured once in a call."""

    problem: Problem
    curvature: str
    values: Memory = field(default_factory=Memory)
    _first: FunctionalProblem | None = None
    _checked: bool = False

    def functional(self, measured: bool = False) -> FunctionalProblem:
        """At the present weights; the first `measured` problem has its derivatives checked."""
        check = measured and self.problem.check and not self._checked
        self._checked |= measured
        if self._first is not None:
            return self._first.at_present_weights(check)
        functional = functional_form(replace(self.problem, check=check))
        # To write through a parametrization may exchange tensors; without, the values alone change.
        if not any(map(parametrize.is_parametrized, self.model.modules())):
            self._first = functional
        return functional

    def of_layers(self, names: Sequence[str]) -> ProblemFactory:
        """The same with other layers."""
        return replace(self, problem=replace(self.problem, layers=names), _first=None)

    def digest(self) -> bytes:
        """A hash of the present weights: several fits of one call draw the same."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            values = local_part(parameter).cpu().contiguous().flatten()
            digest.update(values.view(torch.uint8).numpy().tobytes())
        ranks = lockstep_ranks()
        return digest.digest() if ranks is None else b"".join(ranks.exchange(digest.digest()))

    @functools.cached_property
    def loss_range(self) -> LossRange:
        """What the loss can be; it does not depend on the weights."""
        problem = self.functional()
        with problem.settings(), torch.enable_grad():
            output = problem.output(problem.batches[0])
            like = [batch for batch in problem.batches if batch.size == problem.batches[0].size]
            return find_loss_range(problem.loss_of, output, like)

    @property
    def model(self) -> nn.Module:
        return unwrap(self.problem.model)

    @property
    def sample(self) -> Any:
        batch = self.problem.batch
        return batch[0] if isinstance(batch, tuple) else batch[0][0]


@dataclass(frozen=True)
class OutputStatistics:
    """The loss, the root mean square of the output, and the loss of a zero output."""

    loss: float
    size: float
    zero_loss: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.size)


OUTPUT_NOT_FINITE = OutputStatistics(math.inf, math.inf, math.inf)


class _Evaluated(NamedTuple):
    """The evaluations at some scales, and the engines built on them by estimator and tolerance."""

    scales: dict[str, float]
    evaluations: list[Evaluation]
    of_all: dict[str, Any]  # ranks: the loss and the number of examples
    rows: dict[tuple[str, float], Rows]


def _once_per_scale(
    measure: Callable[[ScaledModel], Remembered],
) -> Callable[[ScaledModel], Remembered]:
    """A method that measures again only where the scales have changed."""

    @functools.wraps(measure)
    def remembered(model: ScaledModel) -> Remembered:
        return model.values.once((measure, *model.scales.values()), lambda: measure(model))

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
        self.values = Memory()
        self._evaluated: _Evaluated | None = None

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
        names = []
        for name, (target, base, restore) in self._base.items():
            if target.is_parametrized:
                target.write_(base * 1.5)
                if not bool((target.value - base * 1.5).abs().max() <= 1e-2 * base.abs().max()):
                    names.append(name)
                restore()
        return names

    def loss_unit(self, *others: float) -> float:
        """How far the loss of a zero output, or of `others`, is above the lowest; inf if unknown.

        The best constant output stands for a zero output where the network's own is not finite.
        """
        losses = [loss for loss in (self.output().zero_loss, *others) if loss < math.inf]
        unit = max([self.factory.loss_range.constant, *losses]) - self.factory.loss_range.free
        return unit if unit > 0 else math.inf

    @_once_per_scale
    def output(self) -> OutputStatistics:
        """One forward; not finite is a result, not an error."""
        try:
            problem = self.factory.functional()
        except WeightsError:  # some are not finite
            return OUTPUT_NOT_FINITE
        with problem.settings():
            pairs = [
                (_output_statistics(problem, batch), batch.rows / problem.rows)
                for batch in problem.batches
            ]
        return OutputStatistics(
            sum(output.loss * share for output, share in pairs),
            math.sqrt(sum(output.size**2 * share for output, share in pairs)),
            sum(output.zero_loss * share for output, share in pairs),
        )

    def loss_is_quadratic(self) -> bool:
        """Whether the loss has the same curvature at twice the output: a softmax has not."""
        problem = self.factory.functional()
        with problem.settings(), torch.enable_grad():
            batch = problem.batches[0]
            output = problem.output(batch).detach()

            def loss(scaled: Tensor) -> Tensor:
                return problem.loss_of(scaled, batch)

            products = [vhp(loss, scale * output, output)[1] for scale in (0.5, 1.0, 2.0)]
        is_same = all(torch.allclose(products[0], product, rtol=1e-3) for product in products)
        return not on_any_rank(not (bool(products[0].any()) and is_same))

    @_once_per_scale
    def network_norm(self) -> float:
        """‖H‖ of all measured weights, to the search's tolerance; inf where it is not finite."""
        if not self.output().is_finite:
            return math.inf
        with self._measuring(every_layer=False) as rows:
            return finite_or_inf(rows.whole.norm.value)

    def own_norm(self, name: str) -> float:
        """‖H‖ of one weight."""
        with self._measuring(every_layer=False) as rows:
            names = [
                layer.parameter for layer in rows.problem.layers if _weight_name(layer) == name
            ]
            return finite_or_inf(rows.main.extremes(names).norm.value) if names else 0.0

    @_once_per_scale
    def layer_norms(self) -> dict[str, float]:
        """‖H‖ of every weight; of the sharper part where a parametrization makes it of several."""
        norms: dict[str, float] = {}
        with self._measuring(every_layer=True) as rows:
            layers = rows.problem.layers
            extremes = rows.main.extremes_of_each([layer.parameter for layer in layers])
            for layer in layers:
                name = _weight_name(layer)
                norm = finite_or_inf(extremes[layer.parameter].norm.value)
                norms[name] = max(norms.get(name, 0.0), norm)
        return norms

    @contextlib.contextmanager
    def _measuring(self, every_layer: bool, reported: bool = False) -> Iterator[Rows]:
        """The engine at the present scales, kept until they change: its graphs take the memory."""
        if self._evaluated is None or self._evaluated.scales != self.scales:
            self._evaluated = None
            problem = self.factory.functional(measured=True)
            with problem.settings():
                self._evaluated = _Evaluated(dict(self.scales), *evaluate_everywhere(problem), {})
        evaluations = self._evaluated.evaluations
        problem = evaluations[0].problem
        curvature = self.factory.curvature
        estimator = "auto" if every_layer else network_estimator(evaluations)
        tolerance = NORM_ACCURACY.expensive_tolerance if reported else self._tolerance
        # Few outputs make further steps cheap, and at 1 % a search may settle on the second value.
        if estimator == "auto" and (reported or curvature == "gauss-newton"):
            tolerance = NORM_ACCURACY.cheap_tolerance
        key = (estimator, tolerance)
        with problem.settings():
            if key not in self._evaluated.rows:
                settings = lanczos_settings(problem, tolerance)
                self._evaluated.rows[key] = Rows(
                    problem, evaluations, curvature, estimator, settings
                )
            yield self._evaluated.rows[key]

    def report(self, every_layer: bool) -> CurvatureReport:
        """As `measure` makes it; layers only where asked for, where few, and by the Gram engine."""
        started = time.perf_counter()
        with self._measuring(every_layer, reported=True) as rows:
            assert self._evaluated is not None
            of_all = self._evaluated.of_all
            problem = rows.problem
            names = [layer.parameter for layer in problem.layers]
            cheap = rows.main.is_cheap(names) or len(names) <= NORM_ACCURACY.most_blocks
            layers: tuple[LayerCurvature, ...] = ()
            if every_layer or cheap:
                ordered = in_running_order(problem, rows.evaluations)
                layers = tuple(rows.layers(ordered).values())
            network = rows.network()
            notes = [*notes_on(problem, rows.evaluations), *note_uncounted(problem)]
            if not layers:
                notes.append("The layers were not measured one by one; the option report does it.")
            report = replace(
                rows.report(layers, network),
                notes=tuple(notes),
                seconds=time.perf_counter() - started,
                **of_all,
            )
        if layers:
            return report
        return replace(report, engine_reason="the network's norm alone was measured")


def network_estimator(evaluations: Sequence[Evaluation]) -> str:
    """The cheaper way to the network's norm alone; the engines choose by the cost of all layers."""
    sizes = [row.output[0].numel() if row.output.ndim else 1 for row in evaluations]
    return "auto" if max(sizes) <= NORM_ACCURACY.most_outputs else "lanczos"


def lanczos_settings(problem: FunctionalProblem, tolerance: float) -> LanczosSettings:
    return LanczosSettings(tolerance, NORM_ACCURACY.max_iterations, problem.seed)


def _output_statistics(problem: FunctionalProblem, batch: Batch) -> OutputStatistics:
    with torch.enable_grad():  # for a forward that differentiates by its inputs
        output = problem.output(batch).detach()
    if on_any_rank(not all_finite(output)):
        return OUTPUT_NOT_FINITE
    with torch.no_grad():
        loss = problem.loss_of(output, batch)
        try:
            zero_loss = problem.loss_of(torch.zeros_like(output), batch)
        except Exception:  # a loss that is not defined for zeros, as one that divides by a length
            zero_loss = torch.full_like(loss, math.nan)
    loss, square, zero_loss = map(
        mean_over_ranks, (loss, output.double().square().mean(), zero_loss)
    )
    return OutputStatistics(float(loss), float(square.sqrt()), float(zero_loss))


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


@dataclass(frozen=True)
class ScalingPaths:
    """The paths of one model: which of its weights matter, make the output, or are homogeneous."""

    model: ScaledModel
    targets: Sequence[Target]
    uses: Sequence[WeightUse]

    def path(self, scaling: str, target: float, nearly: bool = False) -> ScalingPath:
        """The path of a scaling.

        "all": one gain for all weights that matter. "last": the weights whose result is the output,
        or else the one that runs last. "small-output", for homogeneous networks (for others it is
        "last"): the largest weight so small that the output is small, all others larger. A weight's
        own curvature does not depend on its own size, only on that of the others. So the largest
        one gets as sharp as `target`, a norm, allows, and its initial size is next to nothing.
        Where branches are added, scaling them would change their proportions: the first weight on
        the trunk is the small one, and those of the output grow. With `nearly`, a chain without
        residual branches counts as homogeneous whatever its activations.
        """
        if scaling == "all":
            return ScalingPath("all", dict.fromkeys(self.effective, 1.0))
        roles = self._small_output(nearly) if scaling == "small-output" else None
        if roles is None:
            return ScalingPath("last", dict.fromkeys(self.last, 1.0))
        small, large, size = roles
        # The network is about as sharp as the small weight alone will be, and that follows from its
        # norm now.
        norm = self.model.own_norm(small)
        first = math.log(target / norm) / (2 * len(large)) if 0 < norm < math.inf else 0.0
        offset = math.log(SCALING.small_output / size) - first * len(large)
        return ScalingPath(
            "small-output",
            exponents=dict.fromkeys(large, 1.0) | {small: -float(len(large))},
            offsets=dict.fromkeys(large, first) | {small: offset},
            pace=2.0 * len(large),
        )

    @functools.cached_property
    def is_homogeneous(self) -> bool:
        """Whether the output can be made small along a path; costs forwards."""
        return self._small_output() is not None

    def _small_output(self, nearly: bool = False) -> tuple[str, list[str], float] | None:
        """The weight to make small, those to enlarge, and the size of the output.

        None for a network that is not homogeneous.
        """
        last = [name for name in self.last if name in self.effective]
        inner = [name for name in self.effective if name not in last]
        size = self.model.output().size
        if not last or not inner or not 0 < size < math.inf:
            return None
        if any(use.closes_residual for use in self.uses):
            small = self._first_on_trunk(inner, size)
            return None if small is None else (small, last, size)
        halved = dict.fromkeys(self.effective, -math.log(2.0))
        if not nearly and not self._is_proportional(size, halved):
            return None
        entries = {target.name: target.value.numel() for target in self.targets}
        small = max(inner, key=entries.__getitem__)
        return small, [name for name in self.effective if name != small], size

    def _first_on_trunk(self, inner: Sequence[str], size: float) -> str | None:
        """The first weight to run that scales the whole output, not one of its branches."""
        for use in self._known_uses:
            name = self._names[use.parameter]
            if name in inner and self._is_proportional(size, {name: -math.log(4.0)}):
                return name
        return None

    def _is_proportional(self, size: float, logs: Mapping[str, float]) -> bool:
        """Whether the output has the size that the powers of the weights say."""
        self.model.scale_(logs)
        scaled = self.model.output().size
        self.model.scale_({})
        expected = size * math.exp(sum(logs.values()))
        return expected > 0 and abs(scaled / expected - 1) < 1e-3 * len(logs)  # rounding

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        return {target.key: target.name for target in self.targets}

    @functools.cached_property
    def _known_uses(self) -> list[WeightUse]:
        return [use for use in self.uses if use.parameter in self._names]

    @functools.cached_property
    def effective(self) -> list[str]:
        """The weights whose scale no normalization undoes."""
        matter = {use.parameter for use in self._known_uses if not use.norm_follows}
        return [name for key, name in self._names.items() if key in matter or not self.uses]

    @functools.cached_property
    def last(self) -> list[str]:
        """The weights that make the output."""
        if not self.uses:
            return list(self._names.values())[-1:]
        uses = [use for use in self._known_uses if use.downstream.end == "output"]
        if not uses:  # two heads that are joined, say: the latest weights that end in the same way
            running = [
                use for use in self._known_uses if self._names[use.parameter] in self.effective
            ]
            end = running[-1].downstream.end if running else ""
            latest = itertools.takewhile(lambda use: use.downstream.end == end, reversed(running))
            uses = list(latest)[::-1] if end == "cat" else running[-1:]
        return [self._names[key] for key in dict.fromkeys(use.parameter for use in uses)]
