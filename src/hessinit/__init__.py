"""How sharp is each layer of a network before the first step, and what learning rate does that allow?

`measure(model, loss, batch)` answers it; everything else is a way to look at the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hessinit._version import __version__

if TYPE_CHECKING:
    from hessinit.errors import ConvergenceError, ConvergenceWarning, ProblemError
    from hessinit.estimate import Estimate
    from hessinit.measuring import measure
    from hessinit.operators import gauss_newton, hessian, jacobian
    from hessinit.report import CurvatureReport, LayerCurvature, load

# Loaded on first use, so that `import hessinit` and the command line's --help do not wait for torch.
_HOMES = {
    "ConvergenceError": "hessinit.errors",
    "ConvergenceWarning": "hessinit.errors",
    "CurvatureReport": "hessinit.report",
    "Estimate": "hessinit.estimate",
    "LayerCurvature": "hessinit.report",
    "ProblemError": "hessinit.errors",
    "gauss_newton": "hessinit.operators",
    "hessian": "hessinit.operators",
    "jacobian": "hessinit.operators",
    "load": "hessinit.report",
    "measure": "hessinit.measuring",
}

__all__ = [
    "ConvergenceError",
    "ConvergenceWarning",
    "CurvatureReport",
    "Estimate",
    "LayerCurvature",
    "ProblemError",
    "__version__",
    "gauss_newton",
    "hessian",
    "jacobian",
    "load",
    "measure",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hessinit' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # also in place of the submodule of the same name
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
