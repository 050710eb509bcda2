"""What an initialization achieved, in sentences."""

from __future__ import annotations

from hessinit.present.words import format_number, printable
from hessinit.results.initialization import Initialization

MOVED = {
    "gain": ", one gain for all weights",
    "last": ", the last weight scaled",
    "quiet": ", one weight made quiet and the others larger",
    "none": ", nothing scaled",
}


def describe_target(result: Initialization) -> str:
    """The norm that was aimed at, and where it came from."""
    what = "every layer's ‖H‖" if result.rule == "layers" else "the network's ‖H‖"
    target = format_number(result.target)
    if result.lr is not None and result.kappa is not None:
        rate, kappa = format_number(result.lr), format_number(result.kappa)
        if abs(result.target * result.lr / result.kappa - 1) > 1e-6:  # what momentum makes of a step
            longer = format_number(result.kappa / (result.target * result.lr), 3)
            why = f"momentum makes steps {longer} times as long"
            return f"Target: {what} = κ/({longer}·lr) = {kappa}/({longer}·{rate}) = {target}, since {why}."
        return f"Target: {what} = κ/lr = {kappa}/{rate} = {target}."
    if result.lr is not None:
        return f"No target at a rate of {format_number(result.lr)}."
    return f"Target: {what} = {target}."


def conclude_initialization(result: Initialization) -> str:
    """Whether the target was met, and why not."""
    reason = printable(result.reason).strip().rstrip(".")
    return f"{'Met' if result.converged else 'Not met'}: {reason}."


def describe_work(result: Initialization) -> str:
    """The start, what was moved, and the cost."""
    looks = len(result.measurements)
    count = f"{looks} measurement{'' if looks == 1 else 's'}"
    spent = f" in {format_number(result.seconds, 2)} s" if result.seconds is not None else ""
    start = "the weights as found" if result.scheme == "keep" else f"start by {result.scheme}"
    moved = MOVED.get(result.scaling or "", "")
    state = "" if result.applied else " Nothing was written, or this is a copy."
    return f"{start[0].upper()}{start[1:]}{moved}; {count}{spent}.{state}"
