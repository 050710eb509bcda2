"""How sharp is each layer of a network before the first step, and what learning rate does that
allow?

`measure(model, loss, batch)` answers it; everything else is a way to look at the answer.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hessinit._version import __version__ as __version__

# The table of public names. Type checkers read it as it stands. At run time `_homes` reads it, and
# each name is imported on first use: `import hessinit` and the command line's --help do not wait
# for torch.
if TYPE_CHECKING:
    from hessinit.errors import ConvergenceError as ConvergenceError
    from hessinit.errors import ConvergenceWarning as ConvergenceWarning
    from hessinit.errors import EdgeOfStabilityWarning as EdgeOfStabilityWarning
    from hessinit.errors import ProblemError as ProblemError
    from hessinit.errors import RankError as RankError
    from hessinit.init.apply_scheme import apply_scheme_ as apply_scheme_
    from hessinit.init.gain import gain as gain
    from hessinit.init.options import Fit as Fit
    from hessinit.integrations.logits import logits_problem as logits_problem
    from hessinit.measurement.measure import gauss_newton as gauss_newton
    from hessinit.measurement.measure import hessian as hessian
    from hessinit.measurement.measure import jacobian as jacobian
    from hessinit.measurement.measure import measure as measure
    from hessinit.measurement.plan import plan as plan
    from hessinit.problem.problem import Problem as Problem
    from hessinit.progress import ProgressState as ProgressState
    from hessinit.results.advice import LearningRateAdvice as LearningRateAdvice
    from hessinit.results.comparison import Comparison as Comparison
    from hessinit.results.comparison import Run as Run
    from hessinit.results.curvature_report import CurvatureReport as CurvatureReport
    from hessinit.results.curvature_report import Diagnostics as Diagnostics
    from hessinit.results.curvature_report import Estimate as Estimate
    from hessinit.results.curvature_report import JacobianBounds as JacobianBounds
    from hessinit.results.curvature_report import LayerCurvature as LayerCurvature
    from hessinit.results.curvature_report import MeasurementPlan as MeasurementPlan
    from hessinit.results.initialization import Initialization as Initialization
    from hessinit.results.initialization import PlannedWeight as PlannedWeight
    from hessinit.results.initialization import SchemePlan as SchemePlan
    from hessinit.results.result import load as load
    from hessinit.results.track_record import TrackedPoint as TrackedPoint
    from hessinit.results.track_record import Tracking as Tracking
    from hessinit.training.advise import advise as advise
    from hessinit.training.assert_sound import assert_sound as assert_sound
    from hessinit.training.compare import RunSettings as RunSettings
    from hessinit.training.compare import compare as compare
    from hessinit.training.compare import sweep as sweep
    from hessinit.training.initialize import initialize_ as initialize_
    from hessinit.training.optimizers import Training as Training
    from hessinit.training.track import Tracker as Tracker
    from hessinit.training.track import TrackSettings as TrackSettings
    from hessinit.training.track import track as track


def _homes() -> dict[str, str]:
    """Each public name with the module that defines it."""
    (table,) = (
        node for node in ast.parse(Path(__file__).read_bytes()).body if isinstance(node, ast.If)
    )
    imports = [node for node in table.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_HOMES = _homes()
__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hessinit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
