"""How sharp is each layer of a network before the first step, and what learning rate does that allow?

`measure(model, loss, batch)` answers it; everything else is a way to look at the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hessinit._version import __version__

if TYPE_CHECKING:
    from hessinit.advising.advise import advise
    from hessinit.asserting import assert_sound
    from hessinit.comparing.compare import compare
    from hessinit.comparing.sweep import sweep
    from hessinit.errors import ConvergenceError, ConvergenceWarning, EdgeOfStabilityWarning, ProblemError
    from hessinit.estimate import Estimate
    from hessinit.initializing.initialize import initialize_
    from hessinit.integrations.logits import logits_problem
    from hessinit.measuring import measure
    from hessinit.operators import gauss_newton, hessian, jacobian
    from hessinit.quadratic import quadratic_form
    from hessinit.report import CurvatureReport, LayerCurvature, load
    from hessinit.report.advice import LearningRateAdvice
    from hessinit.report.comparison import Comparison
    from hessinit.report.diagnostics import Diagnostics
    from hessinit.report.initialization import Initialization
    from hessinit.report.products import JacobianBounds
    from hessinit.report.quadratic import QuadraticForm, QuadraticForms
    from hessinit.report.run import Run
    from hessinit.report.scheme_plan import PlannedWeight, SchemePlan
    from hessinit.report.tracking import TrackedPoint, Tracking
    from hessinit.schemes.applying import apply_scheme_
    from hessinit.schemes.gains import gain
    from hessinit.tracking.track import Tracker, track

# Loaded on first use, so that `import hessinit` and the command line's --help do not wait for torch.
_HOMES = {
    "Comparison": "hessinit.report.comparison",
    "ConvergenceError": "hessinit.errors",
    "ConvergenceWarning": "hessinit.errors",
    "CurvatureReport": "hessinit.report",
    "Diagnostics": "hessinit.report.diagnostics",
    "EdgeOfStabilityWarning": "hessinit.errors",
    "Estimate": "hessinit.estimate",
    "Initialization": "hessinit.report.initialization",
    "JacobianBounds": "hessinit.report.products",
    "LayerCurvature": "hessinit.report",
    "LearningRateAdvice": "hessinit.report.advice",
    "PlannedWeight": "hessinit.report.scheme_plan",
    "ProblemError": "hessinit.errors",
    "QuadraticForm": "hessinit.report.quadratic",
    "QuadraticForms": "hessinit.report.quadratic",
    "Run": "hessinit.report.run",
    "SchemePlan": "hessinit.report.scheme_plan",
    "TrackedPoint": "hessinit.report.tracking",
    "Tracker": "hessinit.tracking.track",
    "Tracking": "hessinit.report.tracking",
    "advise": "hessinit.advising.advise",
    "apply_scheme_": "hessinit.schemes.applying",
    "assert_sound": "hessinit.asserting",
    "compare": "hessinit.comparing.compare",
    "gain": "hessinit.schemes.gains",
    "gauss_newton": "hessinit.operators",
    "hessian": "hessinit.operators",
    "initialize_": "hessinit.initializing.initialize",
    "jacobian": "hessinit.operators",
    "load": "hessinit.report",
    "logits_problem": "hessinit.integrations.logits",
    "measure": "hessinit.measuring",
    "quadratic_form": "hessinit.quadratic",
    "sweep": "hessinit.comparing.sweep",
    "track": "hessinit.tracking.track",
}

__all__ = [
    "Comparison",
    "ConvergenceError",
    "ConvergenceWarning",
    "CurvatureReport",
    "Diagnostics",
    "EdgeOfStabilityWarning",
    "Estimate",
    "Initialization",
    "JacobianBounds",
    "LayerCurvature",
    "LearningRateAdvice",
    "PlannedWeight",
    "ProblemError",
    "QuadraticForm",
    "QuadraticForms",
    "Run",
    "SchemePlan",
    "TrackedPoint",
    "Tracker",
    "Tracking",
    "__version__",
    "advise",
    "apply_scheme_",
    "assert_sound",
    "compare",
    "gain",
    "gauss_newton",
    "hessian",
    "initialize_",
    "jacobian",
    "load",
    "logits_problem",
    "measure",
    "quadratic_form",
    "sweep",
    "track",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hessinit' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
