"""Layer-sequential unit variance (Mishkin & Matas, ICLR 2016), in one forward pass.

What a layer gives is linear in its weight, so one division makes its variance 1; what follows then runs on
the corrected output. The original runs the network several times for each layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from hessinit.errors import ProblemError
from hessinit.problem.batches import tensors_in
from hessinit.problem.layers import layer_name
from hessinit.schemes.operations import MIXING, name_of

# With a bias one division is not exact. The original allows ten, to within a tenth.
_ROUNDS = 10
_CLOSE = 1e-3
_CLOSE_ENOUGH = 0.1
_EXPLODING = 0.5  # a later use may be twice as large as wanted, as it is in recurrences and at random


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
        self.silent: list[str] = []

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
            self.silent.append(
                name
            )  # as on the zero state that a recurrence starts from: its next use may tell
            return result
        self.factors[name] = 1.0
        for _ in range(_ROUNDS):
            deviation = _deviation(result)
            if math.isnan(deviation):
                raise ProblemError(
                    f"what {layer_name(name)} gives on this sample holds NaN or inf; clean it."
                )
            if not 0 < deviation < math.inf:
                raise ProblemError(
                    f"what {layer_name(name)} gives on this sample has standard deviation {deviation:g}, so "
                    "no scale makes it 1. Pass a sample of several examples that differ."
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
