"""What tracking found, in sentences."""

from __future__ import annotations

import math

from hessinit.present.numbers import format_number, printable
from hessinit.report.tracking import TrackedPoint, Tracking

# Less is within what mini-batches and rounding do.
_CHANGED = 1.1


def warn_of_edge(point: TrackedPoint, optimizer: str) -> str:
    """The warning: where, how far, and what to do."""
    assert point.lr is not None
    rate, stable = format_number(point.lr), format_number(point.stable_lr)
    return (
        f"step {point.step}: the learning rate {rate} is at or beyond the edge of stability, "
        f"{stable} for {optimizer or 'gradient descent'}: ‖H‖ = {format_number(point.norm)}, so lr·‖H‖ = "
        f"{format_number(point.lr * point.norm)}, and steps are stable up to lr·‖H‖ = "
        f"{format_number(point.stable_lr * point.norm)}. If the loss rises or jumps, lower the rate below "
        f"{stable}, warm up more slowly, or start with hessinit.initialize_(…, lr={point.lr:g})."
    )


def conclude_tracking(tracking: Tracking) -> str:
    """What became of the sharpness, and where it met the edge."""
    seen = [point for point in tracking.points if math.isfinite(point.norm)]
    if not seen:
        return "Nothing was measured." if not tracking.points else "No measurement succeeded."
    return f"{_course(seen)} {_edge(tracking, seen)}".strip()


def describe_tracking(tracking: Tracking) -> str:
    """What was measured, and what it cost."""
    count = len(tracking.points)
    looks = f"{count} measurement{'' if count == 1 else 's'}"
    kind = "Gauss-Newton" if tracking.curvature == "gauss-newton" else "the exact Hessian"
    share = f"{format_number(100 * tracking.overhead, 2)} % of {format_number(tracking.seconds, 2)} s"
    return f"{looks} of {kind} on {tracking.examples} examples took {share}."


def _course(seen: list[TrackedPoint]) -> str:
    first, last = seen[0], seen[-1]
    if len(seen) == 1:
        return f"‖H‖ = {format_number(first.norm)} at step {first.step}."
    peak = max(seen, key=lambda point: point.norm)
    span = f"from {format_number(first.norm)} at step {first.step} to {format_number(last.norm)}"
    if last.norm > first.norm * _CHANGED:
        course = f"The network sharpened {span} at step {last.step}"
    elif last.norm * _CHANGED < first.norm:
        course = f"The network flattened {span} at step {last.step}"
    else:
        course = f"The sharpness stayed, {span} at step {last.step}"
    if peak.norm > _CHANGED * max(first.norm, last.norm):
        course += f", with a peak of {format_number(peak.norm)} at step {peak.step}"
    return course + "."


def _edge(tracking: Tracking, seen: list[TrackedPoint]) -> str:
    known = [point for point in seen if point.edge is not None]
    who = printable(tracking.optimizer) or "gradient descent"
    if not known:
        return ""
    beyond = [point for point in known if point.edge is not None and point.edge >= 1]
    if not beyond:
        nearest = max(known, key=lambda point: point.edge or 0.0)
        share = format_number(100 * (nearest.edge or 0.0), 2)
        where = f"at most {share} % of it, at step {nearest.step}"
        return f"The rate stayed below the edge of stability of {who}: {where}."
    limit = format_number(beyond[0].stable_lr * beyond[0].norm)
    where = f"lr·‖H‖ reached the edge of stability ({limit} for {who}) at step {beyond[0].step}"
    if len(beyond) == len(known):
        return f"At every measurement lr·‖H‖ was at or beyond the edge of stability ({limit} for {who})."
    verb = "was" if len(beyond) == 1 else "were"
    return f"{where}; {len(beyond)} of {len(known)} measurements {verb} at or beyond it."
