"""Layer-sequential unit variance (Mishkin & Matas, ICLR 2016), in one forward pass.

A layer's output is linear in its weight, so one division makes its variance 1; what follows then runs on the
corrected output. The original runs the network several times for each layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hessinit.errors import ProblemError
from hessinit.init.targets import Target
from hessinit.init.trace import MIXING, name_of
from hessinit.init.tracers import prepare_sample, preserved, run
from hessinit.problem.batches import tensors_in
from hessinit.problem.layers import layer_name
from hessinit.problem.problem import Forward

# With a bias one division is not exact. The original allows ten, to within a tenth.
_ROUNDS = 10
_CLOSE = 1e-3
_CLOSE_ENOUGH = 0.1
_EXPLODING = 0.5  # a later use may be twice as large as wanted, as it is in recurrences and at random
# A weight that grew by more than this factor, to more than this size, undoes something meant to be small.
_GROWN = 1000.0


class UnitVariance(TorchFunctionMode):
    """Scales each of `weights`, in place, where a layer first uses it, until its output has the wanted std.

    `wanted` holds the standard deviations that are not 1, `factors` what each weight was multiplied by. A
    weight whose output cannot be brought there (its bias alone is too large) is left as it was and named
    in `failed`; one that a later use would have made explode is in `shrunk`, with the factor.
    """

    def __init__(self, weights: Mapping[str, Tensor], wanted: Mapping[str, float]) -> None:
        super().__init__()
        # By storage: `x @ weight.T` uses a view.
        self._names = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}
        self._weights = weights
        self._wanted = wanted
        self.factors: dict[str, float] = {}
        self.failed: list[str] = []
        self.shrunk: dict[str, float] = {}
        self.zero: list[str] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if name_of(function) in MIXING | {"embedding", "embedding_bag"} and isinstance(result, Tensor):
            for name in self._met(args, kwargs):
                adjust = self._shrink_ if name in self.factors else self._scale_
                result = adjust(name, result, functools.partial(function, *args, **kwargs))
        return result

    def _met(self, args: Any, kwargs: Any) -> list[str]:
        """The weights among the arguments."""
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.numel()]
        places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        return [self._names[place] for place in places if place in self._names]

    def _shrink_(self, name: str, result: Tensor, again: Callable[[], Tensor]) -> Tensor:
        """A tied weight must suit the use that would explode first: an output layer tied to an embedding."""
        deviation = _deviation(result)
        factor = self._wanted.get(name, 1.0) / deviation if deviation > 0 else 1.0
        if not factor < _EXPLODING or name in self.failed:
            return result
        self._weights[name].mul_(factor)
        self.factors[name] *= factor
        self.shrunk[name] = self.shrunk.get(name, 1.0) * factor
        return again()

    def _scale_(self, name: str, result: Tensor, again: Callable[[], Tensor]) -> Tensor:
        wanted = self._wanted.get(name, 1.0)
        if not bool(result.any()):
            self.zero.append(
                name
            )  # as on the zero state that a recurrence starts from: its next use may tell
            return result
        self.factors[name] = 1.0
        for _ in range(_ROUNDS):
            deviation = _deviation(result)
            if math.isnan(deviation):
                raise ProblemError(
                    f"the output of {layer_name(name)} on this sample holds NaN or inf; clean it."
                )
            if not 0 < deviation < math.inf:
                raise ProblemError(
                    f"the output of {layer_name(name)} on this sample has standard deviation {deviation:g}, "
                    "so no scale makes it 1. Pass a sample of several examples that differ."
                )
            if abs(deviation / wanted - 1) < _CLOSE:
                return result
            self._weights[name].mul_(wanted / deviation)
            self.factors[name] *= wanted / deviation
            result = again()
        if abs(_deviation(result) / wanted - 1) < _CLOSE_ENOUGH:
            return result
        self._weights[name].div_(self.factors[name])
        self.factors[name] = 1.0
        self.failed.append(name)
        return again()


def _deviation(result: Tensor) -> float:
    return float(result.detach().double().std(correction=0))


def scale_to_unit_variance_(
    model: nn.Module,
    wanted: Mapping[str, tuple[Target, float, float]],
    weights: dict[str, Tensor],
    biases: dict[nn.Parameter, Tensor],
    sample: Any,
    forward: Forward | None,
) -> tuple[str, ...]:
    """Scale `weights` in place by one forward on copies of them; returns notes on what could not be scaled.

    `wanted` gives for each weight its target, the std of its output, and the dropout's factor on top.
    """
    plain = {key: target for key, (target, _, _) in wanted.items() if not target.is_parametrized}
    copies = {key: weights[key].to(target.stored[0], copy=True) for key, target in plain.items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    tensors = {**buffers, **copies, **{names[id(bias)]: value for bias, value in biases.items()}}
    mode = UnitVariance(copies, {key: std for key, (_, std, _) in wanted.items()})
    with preserved(model):
        run(model, prepare_sample(model, sample), forward, tensors, mode)
    if mode.zero and not mode.factors:
        raise ProblemError(
            f"the output of {layer_name(mode.zero[0])} on this sample is 0 everywhere, and so is all behind "
            "it, so there is nothing to measure. Pass a sample of several examples that differ."
        )
    for key, (_, _, dropout_factor) in wanted.items():
        weights[key] *= mode.factors.get(key, 1.0) * dropout_factor
    return tuple(_notes(mode, {key: target for key, (target, _, _) in wanted.items()}, weights))


def _notes(mode: UnitVariance, targets: Mapping[str, Target], weights: Mapping[str, Tensor]) -> list[str]:
    parametrized = [target.name for target in targets.values() if target.is_parametrized]
    unseen = [
        target.name
        for key, target in targets.items()
        if key not in mode.factors and not target.is_parametrized
    ]
    notes = []
    if unseen:
        notes.append(f"{', '.join(unseen)}: no output of their own to measure, so left orthogonal.")
    if parametrized:
        notes.append(f"{', '.join(parametrized)}: parametrized, so not scaled; left orthogonal.")
    for key, factor in mode.factors.items():
        size = float(weights[key].double().square().mean().sqrt())
        if factor > _GROWN and size > _GROWN:
            notes.append(
                f"{targets[key].name} gets a standard deviation of {size:.2g}, because its input is that "
                "small. If a gate or a LayerScale before it is meant to start small, leave it out (layers=)."
            )
    for key, factor in mode.shrunk.items():
        notes.append(
            f"{targets[key].name} is used again, where its output would be {1 / factor:.2g} times too large, "
            "so it is that much smaller, and the output of its first use starts small."
        )
    if mode.failed:
        failed = ", ".join(targets[key].name for key in mode.failed)
        notes.append(f"{failed}: no scale gives variance 1 (a bias? max_norm?), left orthogonal.")
    return notes
