"""A model on the bench: its weights scaled from a base, looked at, measured, and put back."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.curvature.engines import Engine, LanczosSettings, gauss_newton_engine, hessian_engine
from hessinit.curvature.evaluation import evaluate
from hessinit.initializing.reports import TOLERANCE, make_report, network_estimator
from hessinit.problem.batches import Batch, read_batches
from hessinit.problem.layers import all_finite, layer_name
from hessinit.problem.problem import Forward, Loss, Problem, explained_memory
from hessinit.results.curvature_report import CurvatureReport
from hessinit.schemes.record import parametrized_name
from hessinit.schemes.targets import Target


class Once:
    """If `wanted`, true the first time it is taken."""

    def __init__(self, wanted: bool) -> None:
        self.wanted, self._left = wanted, wanted

    def take(self) -> bool:
        left, self._left = self._left, False
        return left


@dataclass(frozen=True)
class Setting:
    """What is measured, and how; the same for every look."""

    model: nn.Module
    loss: Loss
    batch: Any
    layers: str | Iterable[str] | None
    forward: Forward | None
    curvature: str
    dropout: str
    reduction: str
    seed: int
    check: Once

    def problem(self) -> Problem:
        """With the weights as they are now."""
        return Problem(
            self.model, self.loss, self.batch, layers=self.layers, forward=self.forward,
            dropout=self.dropout, reduction=self.reduction, check=False, seed=self.seed,
        )  # fmt: skip

    def problem_to_measure(self) -> Problem:
        """The same; the first one whose curvature is measured has its derivatives checked."""
        problem = self.problem()
        problem.check = self.check.take()
        return problem

    @property
    def sample(self) -> Any:
        """The inputs of the first batch, as the model gets them."""
        return self.batch[0] if isinstance(self.batch, tuple) else self.batch[0][0]


def read_once(batch: Any) -> Any:
    """A batch that can be read again and again, also from what can be read only once."""
    found = read_batches(batch)
    if len(found) == 1 and not found[0][0]:
        return (found[0][1].inputs, found[0][1].targets)
    return [(one.inputs, one.targets) for _, one in found]


@dataclass(frozen=True)
class Look:
    """What one forward tells: the loss, the size of the output, and the loss of an output of zeros."""

    loss: float
    size: float
    silent: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.size)

    def is_saturated(self, most_sharpening: float) -> bool:
        """Whether the loss is more than so many times that of zeros, where zeros lose anything."""
        if not self.silent or not math.isfinite(self.silent):
            return False
        return self.loss > self.silent + (most_sharpening - 1) * abs(self.silent)


NOT_FINITE = Look(math.inf, math.inf, math.inf)


class Workbench:
    """The present weights are the base; `scale_` multiplies from there, never on top of an earlier scale."""

    def __init__(self, setting: Setting, targets: Sequence[Target], tolerance: float) -> None:
        self.setting = setting
        self._effort = LanczosSettings(tolerance, 200, setting.seed)
        self._base = {target.name: (target, target.value.clone(), target.keep()) for target in targets}
        self._factors = dict.fromkeys(self._base, 1.0)

    @property
    def scales(self) -> dict[str, float]:
        """The present factors on top of the base."""
        return dict(self._factors)

    def scale_(self, logs: Mapping[str, float]) -> None:
        """Write base × exp(log); weights that are not named go back to their base."""
        for name, (target, base, go_back) in self._base.items():
            factor = _exponential(logs.get(name, 0.0))
            if factor == self._factors[name]:
                continue
            self._factors[name] = factor
            if factor == 1.0:
                go_back()  # through a parametrization the base would come back only rounded
            else:
                target.write_(base * factor)

    def unmovable(self) -> list[str]:
        """The weights whose parametrization takes their scale away again, as a spectral norm does."""
        stuck = []
        for name, (target, base, go_back) in self._base.items():
            if target.is_parametrized:
                target.write_(base * 1.5)
                moved = (target.value - base * 1.5).abs().max() <= 1e-2 * base.abs().max()
                go_back()
                if not bool(moved):
                    stuck.append(name)
        return stuck

    def look(self) -> Look:
        """One forward; not finite is an answer, not an error."""
        if not all(all_finite(parameter.detach()) for parameter in _real(self.setting.model)):
            return NOT_FINITE
        problem = self.setting.problem()
        with problem.settings(), explained_memory(problem):
            looks = [_look(problem, batch) for batch in problem.batches]
        shares = [batch.size / problem.examples for batch in problem.batches]
        return Look(
            sum(look.loss * share for look, share in zip(looks, shares, strict=True)),
            math.sqrt(sum(look.size**2 * share for look, share in zip(looks, shares, strict=True))),
            sum(look.silent * share for look, share in zip(looks, shares, strict=True)),
        )

    def loss_is_quadratic(self) -> bool:
        """Whether the loss bends as much at twice the output: a softmax does not."""
        problem = self.setting.problem()
        with problem.settings(), explained_memory(problem):
            batch = problem.batches[0]
            output = problem.output(batch).detach()
            bends = [_bend(problem, batch, factor * output, output) for factor in (0.5, 1.0, 2.0)]
        first = bends[0]
        return bool(first.abs().max() > 0) and all(torch.allclose(first, bend, rtol=1e-3) for bend in bends)

    def network_norm(self) -> float:
        """‖H‖ of all measured weights, to the search's tolerance; inf where it is not finite."""
        with self._engine(every_layer=False) as (problem, engine):
            return _size(engine.extremes([layer.parameter for layer in problem.layers]).norm.value)

    def own_norm(self, name: str) -> float:
        """‖H‖ of one weight."""
        with self._engine(every_layer=False) as (problem, engine):
            own = [
                layer.parameter
                for layer in problem.layers
                if layer_name(parametrized_name(layer.parameter)) == name
            ]
            return _size(engine.extremes(own).norm.value) if own else 0.0

    def layer_norms(self) -> dict[str, float]:
        """‖H‖ of every weight; of the sharper part where a parametrization makes it of several."""
        with self._engine(every_layer=True) as (problem, engine):
            ends = engine.extremes_of_each([layer.parameter for layer in problem.layers])
            found: dict[str, float] = {}
            for layer in problem.layers:
                name = layer_name(parametrized_name(layer.parameter))
                found[name] = max(found.get(name, 0.0), _size(ends[layer.parameter].norm.value))
            return found

    def report(self, every_layer: bool) -> CurvatureReport:
        """To full accuracy, as `measure` gives it; without layers that are dear and not asked for."""
        problem = self.setting.problem_to_measure()
        with problem.settings(), explained_memory(problem):
            return make_report(problem, self.setting.curvature, every_layer)

    @contextlib.contextmanager
    def _engine(self, every_layer: bool) -> Iterator[tuple[Problem, Engine]]:
        problem = self.setting.problem_to_measure()
        with problem.settings(), explained_memory(problem):
            evaluations = evaluate(problem)
            if self.setting.curvature == "hessian":
                yield problem, hessian_engine(evaluations, self._effort)
            else:
                estimator = "auto" if every_layer else network_estimator(evaluations)
                # Few outputs make further steps cheap, and at 1 % a search may settle on the second value.
                effort = replace(self._effort, tolerance=TOLERANCE) if estimator == "auto" else self._effort
                yield problem, gauss_newton_engine(evaluations, effort, estimator)


def _look(problem: Problem, batch: Batch) -> Look:
    output: Tensor | None = None
    with contextlib.suppress(RuntimeError), torch.no_grad():
        output = problem.output(batch)
    if output is None:  # a forward that differentiates by its inputs needs the graph; any other fails again
        output = problem.output(batch).detach()
    if not all_finite(output):
        return NOT_FINITE
    with torch.no_grad():
        loss = float(problem.loss_of(output, batch))
        silent = _loss_of_silence(problem, batch, output)
    return Look(loss, float(output.double().square().mean().sqrt()), silent)


def _bend(problem: Problem, batch: Batch, at: Tensor, along: Tensor) -> Tensor:
    """The second derivative of the loss at an output, times a direction; zeros for a loss without one."""
    place = at.clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(problem.loss_of(place, batch), place, create_graph=True)
        if not slope.requires_grad:
            return torch.zeros_like(at)
        (bend,) = torch.autograd.grad((slope * along).sum(), place)
    return bend.detach()


def _loss_of_silence(problem: Problem, batch: Batch, output: Tensor) -> float:
    """nan for a loss that cannot be taken of zeros, as of a length that is divided by."""
    try:
        return float(problem.loss_of(torch.zeros_like(output), batch))
    except Exception:
        return math.nan


def _size(norm: float) -> float:
    return norm if math.isfinite(norm) else math.inf


def _exponential(number: float) -> float:
    return math.exp(min(number, 700.0))


def _real(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.is_floating_point()]


def keep_all(targets: Sequence[Target]) -> Callable[[], None]:
    """Remember the weights and the biases beside them; call it to put them back, bit for bit."""
    ways = [target.keep() for target in targets]
    biases = {id(bias): (bias, bias.detach().clone()) for t in targets for bias in t.biases().values()}

    @torch.no_grad()
    def go_back() -> None:
        for way in ways:
            way()
        for bias, value in biases.values():
            bias.copy_(value)

    return go_back
