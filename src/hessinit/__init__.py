"""How sharp is each layer of a network before the first step, and what learning rate does that allow?

`measure(model, loss, batch)` answers it; everything else is a way to look at the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hessinit._version import __version__

if TYPE_CHECKING:
    from hessinit.errors import ConvergenceError, ConvergenceWarning, EdgeOfStabilityWarning, ProblemError
    from hessinit.init.apply_scheme import apply_scheme_
    from hessinit.init.gain import gain
    from hessinit.init.initialize import initialize_
    from hessinit.integrations.logits import logits_problem
    from hessinit.measurement.matrix_free import gauss_newton, hessian, jacobian
    from hessinit.measurement.measure import measure
    from hessinit.measurement.quadratic_form import quadratic_form
    from hessinit.results.advice import LearningRateAdvice
    from hessinit.results.comparison import Comparison, Run
    from hessinit.results.curvature_report import CurvatureReport, Diagnostics, JacobianBounds, LayerCurvature
    from hessinit.results.estimates import Estimate
    from hessinit.results.initialization import Initialization, PlannedWeight, SchemePlan
    from hessinit.results.quadratic_forms import QuadraticForm, QuadraticForms
    from hessinit.results.result import load
    from hessinit.results.track_record import TrackedPoint, Tracking
    from hessinit.training.advise import advise
    from hessinit.training.assert_sound import assert_sound
    from hessinit.training.compare import compare, sweep
    from hessinit.training.track import Tracker, track

# Loaded on first use, so that `import hessinit` and the command line's --help do not wait for torch.
_HOMES = {
    "Comparison": "hessinit.results.comparison",
    "ConvergenceError": "hessinit.errors",
    "ConvergenceWarning": "hessinit.errors",
    "CurvatureReport": "hessinit.results.curvature_report",
    "Diagnostics": "hessinit.results.curvature_report",
    "EdgeOfStabilityWarning": "hessinit.errors",
    "Estimate": "hessinit.results.estimates",
    "Initialization": "hessinit.results.initialization",
    "JacobianBounds": "hessinit.results.curvature_report",
    "LayerCurvature": "hessinit.results.curvature_report",
    "LearningRateAdvice": "hessinit.results.advice",
    "PlannedWeight": "hessinit.results.initialization",
    "ProblemError": "hessinit.errors",
    "QuadraticForm": "hessinit.results.quadratic_forms",
    "QuadraticForms": "hessinit.results.quadratic_forms",
    "Run": "hessinit.results.comparison",
    "SchemePlan": "hessinit.results.initialization",
    "TrackedPoint": "hessinit.results.track_record",
    "Tracker": "hessinit.training.track",
    "Tracking": "hessinit.results.track_record",
    "advise": "hessinit.training.advise",
    "apply_scheme_": "hessinit.init.apply_scheme",
    "assert_sound": "hessinit.training.assert_sound",
    "compare": "hessinit.training.compare",
    "gain": "hessinit.init.gain",
    "gauss_newton": "hessinit.measurement.matrix_free",
    "hessian": "hessinit.measurement.matrix_free",
    "initialize_": "hessinit.init.initialize",
    "jacobian": "hessinit.measurement.matrix_free",
    "load": "hessinit.results.result",
    "logits_problem": "hessinit.integrations.logits",
    "measure": "hessinit.measurement.measure",
    "quadratic_form": "hessinit.measurement.quadratic_form",
    "sweep": "hessinit.training.compare",
    "track": "hessinit.training.track",
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
