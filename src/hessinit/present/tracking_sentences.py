"""What tracking found, in sentences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hessinit.present.words import format_number, printable
from hessinit.results.track_record import TrackedPoint, Tracking

# Less is within what mini-batches and rounding do.
_CHANGED = 1.1


def warn_of_edge(point: TrackedPoint, optimizer: str) -> str:
    """The warning: where, how far, and what to do."""
    assert point.lr is not None
    rate, stable = format_number(point.lr), format_number(point.stable_learning_rate)
    return (
        f"step {point.step}: the learning rate {rate} is at or beyond the edge of stability, "
        f"{stable} for {optimizer or 'gradient descent'}: ‖H‖ = {format_number(point.norm)}, so lr·‖H‖ = "
        f"{format_number(point.lr * point.norm)}, and steps are stable up to lr·‖H‖ = "
        f"{format_number(point.stable_learning_rate * point.norm)}. If the loss rises or jumps, lower the "
        f"rate below {stable}, warm up more slowly, or start with hessinit.initialize_(…, lr={point.lr:g})."
    )


def conclude_tracking(tracking: Tracking) -> str:
    """What became of the sharpness, and where it met the edge."""
    seen = [point for point in tracking.points if math.isfinite(point.norm)]
    end = find_divergence(tracking)
    diverged = "" if end is None else f"The training diverged: the loss became {end[1]} at step {end[0]}."
    if seen:
        said = [_course(seen), _edge(tracking, seen), _failures(tracking.points, is_known=end is not None)]
    else:
        said = [_nothing(tracking.points)]
    return " ".join(sentence for sentence in (diverged, *said) if sentence)


def find_divergence(tracking: Tracking) -> tuple[int, float] | None:
    """From which step on no training loss is finite, and the first of these; None where the last one is.

    >>> from hessinit.present.tracking_example import example_tracking
    >>> find_divergence(example_tracking()) is None
    True
    """
    given = {point.step: point.training_loss for point in tracking.points if point.training_loss is not None}
    losses = sorted({**dict(tracking.losses), **given}.items(), reverse=True)
    ended = [*itertools.takewhile(lambda pair: not math.isfinite(pair[1]), losses)]
    return ended[-1] if ended else None


def describe_tracking(tracking: Tracking) -> str:
    """What was measured, and what it cost."""
    count = len(tracking.points)
    looks = f"{count} measurement{'' if count == 1 else 's'}"
    kind = "Gauss-Newton" if tracking.curvature == "gauss-newton" else "the exact Hessian"
    share = f"{format_number(100 * tracking.overhead, 2)} % of {format_number(tracking.seconds, 2)} s"
    cost = f"{looks} of {kind} on {tracking.examples} examples took {share}."
    return " ".join(filter(None, (cost, _put_off(tracking))))


def _put_off(tracking: Tracking) -> str:
    """Whether the share of the time was too small for a measurement as often as was asked for."""
    if tracking.max_overhead >= 1 or not tracking.points:
        return ""
    last = max(step for step, _ in [*tracking.losses[-1:], (tracking.points[-1].step, 0.0)])
    due = range(tracking.points[0].step // tracking.every, last // tracking.every + 1)
    missing = len(set(due) - {point.step // tracking.every for point in tracking.points})
    if not missing:
        return ""
    verb = "was" if missing == 1 else "were"
    limit = f"{format_number(100 * tracking.max_overhead)} % of the time"  # not the first and last
    steps = f"{tracking.every} step{'' if tracking.every == 1 else 's'}"
    return (
        f"Of {len(due)} that were due, one every {steps}, {missing} {verb} left out: they may take {limit}; "
        "a share of 1 measures all."
    )


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
    known = [point for point in seen if point.lr_over_limit is not None]
    who = printable(tracking.optimizer) or "gradient descent"
    if not known:
        return ""
    beyond = [point for point in known if point.lr_over_limit is not None and point.lr_over_limit >= 1]
    if not beyond:
        nearest = max(known, key=lambda point: point.lr_over_limit or 0.0)
        share = format_number(100 * (nearest.lr_over_limit or 0.0), 2)
        where = f"at most {share} % of it, at step {nearest.step}"
        # What is not measured, as biases are not, may have an edge of its own.
        return f"For the measured weights the rate stayed below the edge of stability of {who}: {where}."
    limit = format_number(beyond[0].stable_learning_rate * beyond[0].norm)
    where = f"lr·‖H‖ reached the edge of stability ({limit} for {who}) at step {beyond[0].step}"
    if len(beyond) == len(known):
        # Along negative curvature, and for adaptive optimizers, the edge is another at every point.
        limits = sorted(point.stable_learning_rate * point.norm for point in known)
        span = " to ".join(dict.fromkeys(format_number(one) for one in (limits[0], limits[-1])))
        return f"At every measurement lr·‖H‖ was at or beyond the edge of stability ({span} for {who})."
    verb = "was" if len(beyond) == 1 else "were"
    return f"{where}; {len(beyond)} of {len(known)} measurements {verb} at or beyond it."


def _nothing(points: Sequence[TrackedPoint]) -> str:
    if not points:
        return "Nothing was measured."
    if any(math.isinf(point.norm) for point in points):
        return "‖H‖ was not finite at any measurement."
    return "No measurement succeeded."


def _failures(points: Sequence[TrackedPoint], is_known: bool) -> str:
    """Whether there were points without a number; a network that has diverged has them to the end."""
    failed = [point for point in points if not math.isfinite(point.norm)]
    if not failed:
        return ""
    last = [*itertools.takewhile(lambda point: not math.isfinite(point.norm), reversed(points))]
    if len(last) == len(failed):
        why = "" if is_known else "; the training may have diverged"
        return f"From step {last[-1].step} on no measurement succeeded{why}."
    return f"{len(failed)} of {len(points)} measurements failed."
