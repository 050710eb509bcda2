"""What a report's numbers mean, in sentences."""

from __future__ import annotations

import math

from hessinit.present.words import (
    begin_sentence,
    call_layer,
    format_number,
    format_times,
    join_names,
    printable,
)
from hessinit.results.curvature_report import (
    EXPLODING_ABOVE,
    VANISHING_BELOW,
    CurvatureReport,
    LayerCurvature,
)
from hessinit.results.estimates import Estimate

MATRIX_NAMES = {
    "gauss-newton": "Gauss-Newton",
    "hessian": "Exact Hessian",
    "both": "Exact Hessian and Gauss-Newton",
}
ENGINE_NAMES = {"gram": "Gram", "lanczos": "Lanczos"}


def conclude(report: CurvatureReport) -> str:
    """Say how the layers compare, what learning rate that allows, and what not to trust."""
    sentences = (
        *_compare(report.layers),
        *_extremes(report.layers),
        _rate(report),
        *_gap(report.layers, report.network.gap if report.network_measured else None),
        *_doubt(report),
    )
    return " ".join(map(begin_sentence, sentences))


def describe_cost(report: CurvatureReport) -> str:
    """Say what was measured, by which engine and why, in what time."""
    count = f"{len(report)} layer{'' if len(report) == 1 else 's'}"
    spent = f" in {format_number(report.seconds, 2)} s" if report.seconds is not None else ""
    if report.gradients is not None:
        spent += f" ({format_number(report.gradients, 2)} gradients)"
    engine = ENGINE_NAMES.get(report.engine, printable(report.engine))
    why = f": {_unstopped(report.engine_reason)}" if report.engine_reason else ""
    examples = f"{report.examples:,} example{'' if report.examples == 1 else 's'}"
    batches = f" in {report.batches} batches" if report.batches > 1 else ""
    matrix = MATRIX_NAMES[report.curvature]
    return (
        f"{count}{spent} by the {engine} engine{why}. "
        f"{matrix} on {examples}{batches}; loss {format_number(report.loss)}."
    )


def _compare(layers: tuple[LayerCurvature, ...]) -> list[str]:
    if not layers:
        return ["No layer was measured."]
    if len(layers) == 1:
        return [
            f"{call_layer(layers[0].name)} has ‖H‖ = {format_number(layers[0].norm)} ({layers[0].verdict})."
        ]
    curved = sorted((row for row in layers if 0 < row.norm < math.inf), key=lambda row: row.norm)
    if len(curved) < 2:
        return []
    ratio = curved[-1].norm / curved[0].norm
    if ratio < 1.5:
        every = "Both" if len(layers) == 2 else f"All {len(layers)}"
        which = every if len(curved) == len(layers) else f"{len(curved)} of {len(layers)}"
        return [f"{which} layers are about equally sharp."]
    sharpest, flattest = call_layer(curved[-1].name), call_layer(curved[0].name)
    return [f"{sharpest} is {format_times(ratio)} times sharper than {flattest}."]


def _extremes(layers: tuple[LayerCurvature, ...]) -> list[str]:
    overflowing = [call_layer(row.name) for row in layers if not math.isfinite(row.norm)]
    exploding = [call_layer(row.name) for row in layers if EXPLODING_ABOVE < row.norm < math.inf]
    vanishing = [call_layer(row.name) for row in layers if 0 < row.norm < VANISHING_BELOW]
    flat = [call_layer(row.name) for row in layers if row.norm == 0]
    sentences = []
    if overflowing:
        verb, where = ("is", "there") if len(overflowing) == 1 else ("are", "in them")
        sentences.append(
            f"{join_names(overflowing)} {verb} not finite: the numbers overflow {where}. "
            "Start from smaller weights, or measure in float64."
        )
    if exploding:
        verb = "explodes" if len(exploding) == 1 else "explode"
        sentences.append(f"{join_names(exploding)} {verb}: ‖H‖ is above {format_number(EXPLODING_ABOVE)}.")
    if vanishing:
        verb, pronoun = (
            ("vanishes", "it hardly moves") if len(vanishing) == 1 else ("vanish", "they hardly move")
        )
        limit = format_number(VANISHING_BELOW)
        sentences.append(f"{join_names(vanishing)} {verb} (‖H‖ is below {limit}): {pronoun} the loss.")
    if flat:
        verb, pronoun = ("has", "it") if len(flat) == 1 else ("have", "them")
        sentences.append(
            f"{join_names(flat)} {verb} no curvature (‖H‖ = 0): the loss does not bend with {pronoun} at all."
        )
    return sentences


def _rate(report: CurvatureReport) -> str:
    network = report.network
    is_bound = not report.network_measured and network.error > 0
    if network.norm == 0 and not is_bound:
        return "The network has no curvature, so it sets no limit to the learning rate."
    if not math.isfinite(network.norm):
        return (
            f"The network's ‖H‖ is {format_number(network.norm)}: no learning rate is safe from this start."
        )
    if is_bound:
        return bound_rates(report)
    limit, best = format_number(report.stable_learning_rate, 2), format_number(report.learning_rate, 2)
    if -network.bottom_eigenvalue > network.top_eigenvalue:
        # Along a direction that curves down no step is too long; 2/‖H‖ is then only where the guarantee ends.
        return (
            f"The network curves down more than up (λ = {format_number(network.bottom_eigenvalue)}): a step "
            f"in these weights is sure to lower the loss up to lr = 2/‖H‖ = {limit}; {best} is best "
            "guaranteed."
        )
    # More parameters make ‖H‖ no smaller: the limit holds with those that are not measured, too.
    unstable = f"Gradient descent is unstable above lr = 2/‖H‖ = {limit}"
    return f"{unstable}; {best} is best guaranteed for these weights."


def bound_rates(report: CurvatureReport) -> str:
    """What the layers alone tell of the rates, where network=False left the network out."""
    network = report.network
    least, highest = format_number(network.norm), format_number(report.stable_learning_rate, 2)
    # An upper bound is the sum of the layers' norms: of all of them, and only where they are known.
    if math.isfinite(network.error) and all(row.converged for row in report.layers):
        most = network.norm + network.error
        lowest = format_number(2 / most, 2)
        return (
            f"The network was not measured (network=False): by the layers its ‖H‖ is {least} to "
            f"{format_number(most)}, so gradient descent in these weights is stable below lr = {lowest} and "
            f"unstable above {highest}."
        )
    return (
        f"The network was not measured (network=False): its ‖H‖ is at least {least}, and so 2/‖H‖ at most "
        f"{highest}. Measure it, too, to know which learning rates are stable."
    )


def _gap(layers: tuple[LayerCurvature, ...], whole: float | None) -> list[str]:
    gaps = [(row.gap, row.name) for row in layers if row.gap is not None and 0 < row.gap < math.inf]
    if not gaps:
        return []
    gap, name = max(gaps, key=lambda pair: abs(math.log(pair[0])))
    if abs(gap - 1) < 0.01:
        agree = "The exact Hessian and Gauss-Newton agree within 1 % on every layer"
        if whole is None or not 0 < whole < math.inf or abs(whole - 1) < 0.01:
            return [f"{agree}."]
        # Layer by layer a ReLU network has no gap; all of it is between the layers.
        return [f"{agree}; for the network as a whole the exact one is {_how_many(whole)} times as large."]
    return [f"{call_layer(name)}'s exact Hessian is {_how_many(gap)} times its Gauss-Newton approximation."]


def _how_many(gap: float) -> str:
    return format_times(gap) if abs(gap - 1) >= 0.05 else format_number(gap)


def _doubt(report: CurvatureReport) -> list[str]:
    ends_are_shown = any(row.indefinite for row in (*report.layers, report.network))
    measured = (*report.layers, report.network) if report.network_measured else report.layers
    doubts: list[tuple[str, Estimate]] = []
    for row in measured:
        shown = [row.estimate, row.approximation, row.trace, row.frobenius]
        shown += [row.top, row.bottom] if ends_are_shown else []
        doubtful = [estimate for estimate in shown if estimate is not None and not estimate.converged]
        if doubtful:
            doubts.append(("the network" if row is report.network else call_layer(row.name), doubtful[0]))
    if not doubts:
        return []
    reason = _unstopped(doubts[0][1].reason)
    return [
        f"Not converged (marked ~): {join_names([name for name, _ in doubts])}"
        + (f"; {reason}." if reason else ".")
    ]


def _unstopped(sentence: str) -> str:
    return printable(sentence).strip().rstrip(".")
