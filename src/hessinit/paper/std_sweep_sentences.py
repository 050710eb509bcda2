"""What a std sweep found, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hessinit.paper.experiment import Setting
from hessinit.paper.rank_correlation import rank_correlation
from hessinit.paper.std_sweep import OURS, Sweep
from hessinit.paper.std_sweep_values import Values, largest_gap, mean_and_error, power_of_std

NUMBERS = {4: "four", 6: "six"}


def write_sentences(sweep: Sweep, setting: Setting, values: Mapping[str, Values]) -> tuple[str, ...]:
    rate = sweep.variant(setting).recipe.learning_rate
    written = [
        *about_the_best(sweep, values),
        about_ranks(sweep, values),
        about_scaling(sweep, values),
        about_exactness(values),
        about_ours(sweep, values, rate),
        about_the_rate(sweep, values, rate),
        about_broken_off(values),
    ]
    return tuple(filter(None, written))


def best_std(sweep: Sweep, values: Mapping[str, Values]) -> str:
    return min(sweep.stds, key=lambda row: values[row].loss)


def about_the_best(sweep: Sweep, values: Mapping[str, Values]) -> list[str]:
    best = best_std(sweep, values)
    norms, starts = values[best].norms, len(values[best].network)
    away = max(max(norm, 1 / norm) if norm else math.inf for norm in norms)
    equals = [row for row in sweep.stds if row != best and is_level(values[row], values[best])]
    lowest = (
        f"Of the {NUMBERS[len(sweep.stds)]} standard deviations {best} ends with the lowest training loss, "
        f"{show_mean(values[best].losses)} (n = {len(values[best].losses)}); the largest |eigenvalue| of its "
        f"two Hessian blocks is {norms[0]:.3g} and {norms[1]:.3g} at the start (means of {starts} starts)."
    )
    claim = (
        f"The paper says that the best standard deviations have norms close to 1: those of {best} are within "
        f"a factor of {away:.2g} of it."
    )
    level = (
        f"By two standard errors of the difference, over the same seeds, {' and '.join(equals)} cannot be "
        f"told from {best}."
    )
    return [lowest, claim, level] if equals else [lowest, claim]


def is_level(one: Values, other: Values) -> bool:
    difference, error = mean_and_error(differences(one, other))
    return abs(difference) <= 2 * error


def differences(one: Values, other: Values) -> list[float]:
    """Seed by seed: both saw the same mini-batches."""
    return [left - right for left, right in zip(one.losses, other.losses, strict=True)]


def about_ranks(sweep: Sweep, values: Mapping[str, Values]) -> str:
    losses = [values[row].loss for row in sweep.stds]
    found = []
    for number, name in enumerate(("first", "second")):
        norms = [values[row].norms[number] for row in sweep.stds]
        away = [abs(math.log(norm)) if norm else math.inf for norm in norms]
        ranked = rank_correlation(away, losses)
        found.append(f"ρ = {ranked.rho:.2f} (p = {ranked.p:.2g}) for the {name} weight")
    return (
        f"Distance of the norm from 1, |ln ‖H‖|, and training loss have a rank correlation (Spearman) of "
        f"{' and '.join(found)}, over {len(losses)} standard deviations (p: two-sided, of all orders); above "
        "0 speaks for the paper."
    )


def about_scaling(sweep: Sweep, values: Mapping[str, Values]) -> str:
    powers = [show_mean(power_of_std(values, sweep.scaling, number)) for number in (0, 1)]
    return (
        f"From std {sweep.scaling[-1]} to {sweep.scaling[0]} the norms grow as the std to the power "
        f"{powers[0]} (first weight) and {powers[1]} (second); exactly two weights that carry the std give 2."
    )


def about_exactness(values: Mapping[str, Values]) -> str:
    return (
        f"In no start is the exact Hessian's norm further than {100 * largest_gap(values):.1g} % from that "
        "by Theorem 1, which is exact for ReLU; both are computed to 0.1 %."
    )


def about_ours(sweep: Sweep, values: Mapping[str, Values], rate: float) -> str:
    best = best_std(sweep, values)
    ours, theirs = values[OURS], values[best]
    difference, error = mean_and_error(differences(ours, theirs))
    if not math.isfinite(difference):
        verdict = f"against {show_mean(theirs.losses)} from std {best}"
    elif is_level(ours, theirs):
        verdict = f"which two standard errors do not tell from std {best} ({difference:+.2g} ± {error:.1g})"
    else:
        share = abs(difference) / theirs.loss
        side = "lower" if difference < 0 else "higher"
        spread = f" ± {error:.1g}" if math.isfinite(error) else ""
        verdict = f"{abs(difference):.2g}{spread} ({share:.0%}) {side} than from std {best}, seed by seed"
    return (
        f"Started by hessinit for lr = {rate:g}, with norms of {ours.norms[0]:.3g} and {ours.norms[1]:.3g}, "
        f"the network ends with {show_mean(ours.losses)} (n = {len(ours.losses)}), {verdict}; that std was "
        f"found by trying {NUMBERS[len(sweep.stds)]}."
    )


def about_the_rate(sweep: Sweep, values: Mapping[str, Values], rate: float) -> str:
    """Why the comparison with hessinit is not the whole story: the paper's rate is one among many."""
    best = best_std(sweep, values)
    ours, theirs = (rate * mean_and_error(values[row].network)[0] for row in (OURS, best))
    if theirs >= 1:
        return ""
    return (
        f"hessinit fits the whole network's norm to the rate, lr · ‖H‖ = {ours:.2g}, not each weight's to 1; "
        f"std {best} has {theirs:.2g}, so a larger rate, which was not tried, should speed it up as well."
    )


def about_broken_off(values: Mapping[str, Values]) -> str:
    counted = {row: sum(not math.isfinite(loss) for loss in found.losses) for row, found in values.items()}
    broken = [f"{count} of {len(values[row].losses)} at {row}" for row, count in counted.items() if count]
    return f"Trainings that ended with a loss that is not finite: {', '.join(broken)}." if broken else ""


def show_mean(values: list[float] | tuple[float, ...]) -> str:
    """
    >>> show_mean([1.0, 1.1, 1.2]), show_mean([2.0])
    ('1.1 ± 0.06', '2')
    """
    mean, error = mean_and_error(values)
    return f"{mean:.3g} ± {error:.1g}" if math.isfinite(error) else f"{mean:.3g}"
