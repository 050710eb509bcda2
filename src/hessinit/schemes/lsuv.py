"""Layer-sequential unit variance (Mishkin & Matas, ICLR 2016), in one forward pass.

What a layer gives is linear in its weight, so one division makes its variance 1; what follows then runs on
the corrected output. The original runs the network several times for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from hessinit.errors import ProblemError
from hessinit.problem.layers import layer_name
from hessinit.problem.structures import tensors_in
from hessinit.schemes.operations import MIXING, name_of

# With a bias one division is not exact. The original allows ten, to within a tenth.
_ROUNDS = 10
_CLOSE = 1e-3
_CLOSE_ENOUGH = 0.1


class UnitVariance(TorchFunctionMode):
    """Scales each of `weights`, in place, where a layer first uses it, until its output has the wanted std.

    `wanted` holds the standard deviations that are not 1, `factors` what each weight was multiplied by. A
    weight whose output cannot be brought there (its bias alone is too large) is left as it was and named
    in `failed`.
    """

    def __init__(self, weights: Mapping[str, Tensor], wanted: Mapping[str, float]) -> None:
        super().__init__()
        # By storage: `x @ weight.T` uses a view.
        self._names = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}
        self._weights = weights
        self._wanted = wanted
        self.factors: dict[str, float] = {}
        self.failed: list[str] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if name_of(function) in MIXING | {"embedding", "embedding_bag"} and isinstance(result, Tensor):
            for name in self._met(args, kwargs):
                result = self._scale_(name, result, lambda: function(*args, **kwargs))
        return result

    def _met(self, args: Any, kwargs: Any) -> list[str]:
        """The weights among the arguments that were not met before."""
        places = [
            tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs)) if tensor.numel()
        ]
        names = [self._names[place] for place in places if place in self._names]
        return [name for name in names if name not in self.factors]

    def _scale_(self, name: str, result: Tensor, again: Callable[[], Tensor]) -> Tensor:
        wanted = self._wanted.get(name, 1.0)
        self.factors[name] = 1.0
        for _ in range(_ROUNDS):
            deviation = float(result.double().std(correction=0))
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
        if abs(float(result.double().std(correction=0)) / wanted - 1) < _CLOSE_ENOUGH:
            return result
        self._weights[name].div_(self.factors[name])
        self.factors[name] = 1.0
        self.failed.append(name)
        return again()
