"""Whether the target was met, by the report that was made at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hessinit.initializing.rules import Outcome
from hessinit.results.curvature_report import CurvatureReport

_AFTER_A_SEARCH = "the search met the target, and the report made after it does not"


def judge(
    after: CurvatureReport | None, rule: str, target: float, tolerance: float, outcome: Outcome
) -> tuple[bool, str]:
    """Met or not, and a sentence with the numbers."""
    if after is None:
        return False, outcome.reason
    limit = f"{100 * tolerance:.3g} %"
    if rule == "network":
        norm = after.network.norm
        if abs(norm / target - 1) <= tolerance:
            return True, f"the network's ‖H‖ = {norm:.3g} is within {limit} of {target:.3g}"
        why = outcome.reason or after.network.reason or _AFTER_A_SEARCH
        return False, f"the network's ‖H‖ = {norm:.3g}, not {target:.3g}: {why}"
    curved = [row for row in after if row.name not in outcome.unreachable]
    off = [row for row in curved if not abs(row.norm / target - 1) <= tolerance]
    if curved and not off:
        return True, f"all {len(curved)} layers have ‖H‖ within {limit} of {target:.3g}"
    if not curved:
        return False, outcome.reason
    worst = max(off, key=lambda row: distance(row.norm, target))
    return False, (
        f"{len(off)} of {len(curved)} layers are not within {limit} of {target:.3g}, the farthest "
        f"{worst.name} with ‖H‖ = {worst.norm:.3g}: {outcome.reason or _AFTER_A_SEARCH}"
    )


def worst_distance(report: CurvatureReport, target: float, left_out: Sequence[str] = ()) -> float:
    """The largest |log(‖H‖/target)| over the layers."""
    return max((distance(row.norm, target) for row in report if row.name not in left_out), default=math.inf)


def distance(norm: float, target: float) -> float:
    return abs(math.log(norm / target)) if 0 < norm < math.inf else math.inf
