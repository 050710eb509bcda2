"""The verdict on a comparison: who wins, who forgives a wrong rate, and who does not train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

from hessinit.present.comparison_sentences import format_result
from hessinit.present.comparison_standing import Result, at_best_rate, diverges_at, ordered_starts, regrets
from hessinit.present.words import format_number, format_ratio, join_names, printable, shorten
from hessinit.results.comparison import Comparison


def conclude_comparison(comparison: Comparison) -> str:
    """Say who wins at its best rate and who loses least over all rates; ties are called ties."""
    return " ".join(conclusions(comparison))


def conclusions(comparison: Comparison) -> list[str]:
    """The same, each conclusion for itself."""
    if comparison.kind == "sweep":
        return _conclude_sweep(comparison)
    return [*_winner(comparison), *_most_forgiving(comparison), *_never(comparison)]


def _winner(comparison: Comparison) -> list[str]:
    standing = {start: at_best_rate(comparison, start) for start in ordered_starts(comparison)}
    trained = [start for start, result in standing.items() if math.isfinite(result.mean)]
    if not trained:
        return [_nothing_trains(comparison)]
    best = trained[0]

    def where(start: str) -> str:
        rate = format_number(comparison.best_rate(start))
        return f"{format_result(standing[start])} at lr {rate}"

    def ties(start: str) -> bool:
        return standing[start].ties_with(standing[best])

    if len(trained) == 1:
        others = " alone" if len(standing) > 1 else ""
        return [f"{_call(best)}{others} trains: {where(best)}."]
    doubt = " (one seed: no error bars)" if len(comparison.seeds) == 1 else ""
    tied = list(takewhile(ties, trained[1:]))
    if tied:
        against = f" and {where(tied[0])}" if len(tied) == 1 else ""
        how = f"the same loss{doubt}" if doubt else "within two standard errors"
        sentences = [f"{join_names([best, *tied])} tie at their best rates: {where(best)}{against}, {how}."]
    else:
        following = f"next {_call(trained[1])}, {where(trained[1])}"
        sentences = [f"{_call(best)} wins at its best rate{doubt}: {where(best)}; {following}."]
    uncertain = [start for start in trained[1 + len(tied) :] if ties(start)]
    if uncertain:
        verb = "is" if len(uncertain) == 1 else "are"
        sentences.append(
            f"{join_names(uncertain)}, farther off but less certain, {verb} within two standard errors, too."
        )
    return sentences


def _nothing_trains(comparison: Comparison) -> str:
    """Why, as far as the runs tell: a lower rate is no remedy for everything."""
    is_sweep = comparison.kind == "sweep"
    kind = "std" if is_sweep else "start"
    runs = [run for run in comparison.runs if run.applies]
    if not runs:
        return f"No {kind} applies to this model; the notes say why."
    if not any(math.isfinite(run.first_loss) for run in runs):
        smaller = ", or try smaller stds" if is_sweep else ""
        return (
            f"No {kind} trains: the very first loss is not finite, whatever the rate. Look at the data, the "
            f"loss and the model{smaller}."
        )
    every = "" if all(run.diverged for run in runs) else " with every seed"
    if is_sweep:
        rate = format_number(comparison.learning_rates[0])
        return f"No std trains{every} at lr {rate}; try a lower rate."
    return f"No start trains{every} at any of these rates; try lower ones."


def _most_forgiving(comparison: Comparison) -> list[str]:
    """Who loses least on average; it is not called forgiving if it diverges where others do not."""
    found = regrets(comparison)
    many = len(comparison.learning_rates)
    if many < 2 or len(found) < 2:
        return []
    risky = {start: rates for start in found if (rates := diverges_at(comparison, start))}
    lowest, second = sorted(found, key=lambda start: found[start].mean)[:2]
    safe = sorted((start for start in found if start not in risky), key=lambda start: found[start].mean)
    if safe and lowest in risky:
        where = join_names([format_number(rate) for rate in risky[lowest]])
        average = f"on average {_times(found[lowest])} times the loss of the best start at each"
        but = f"but it diverges at lr {where}, which counts as guessing"
        calm = f"{_call(safe[0])} diverges nowhere that another start trains"
        least = f"Over the {many} rates {_call(lowest)} loses least, {average}, {but}"
        return [f"{least}; {calm}, at {_times(found[safe[0]])} times."]
    best = lowest
    forgiving = f"{_call(best)} is the most forgiving over the {many} rates"
    average = f"on average {_times(found[best])} times the loss of the best start at each"
    tie = ""
    if found[second].ties_with(found[best]):
        tie = ", the same" if math.isnan(found[best].error) else ", within two standard errors of it"
    counted = " (a divergence counts as guessing)" if {best, second} & set(risky) else ""
    return [f"{forgiving}: {average}; next {_call(second)}, {_times(found[second])} times{tie}{counted}."]


def _times(regret: Result) -> str:
    # The mean of logarithms is a little below the logarithm of the mean: what wins everywhere is at 1.00.
    return format_ratio(math.exp(max(0.0, regret.mean)))


def _never(comparison: Comparison) -> list[str]:
    never = [
        start
        for start in comparison.schemes
        if comparison.applies(start) and math.isnan(comparison.best_rate(start))
    ]
    if not any(comparison.best_rate(start) > 0 for start in comparison.schemes):
        return []  # that none does at all is said already
    at_all = [start for start in never if _all_diverged(comparison, start, comparison.learning_rates)]
    in_part = [start for start in never if start not in at_all]
    sentences = []
    for starts, every in ((at_all, ""), (in_part, " with every seed")):
        if starts:
            verb = "trains" if len(starts) == 1 else "train"
            sentences.append(f"{join_names(starts)} {verb} at none of these rates{every}.")
    return sentences


def _all_diverged(comparison: Comparison, start: str, rates: Sequence[float]) -> bool:
    return all(run.diverged for rate in rates for run in comparison.runs_of(start, rate) if run.applies)


def _call(start: str) -> str:
    return shorten(printable(start))


def _conclude_sweep(comparison: Comparison) -> list[str]:
    (rate,) = comparison.learning_rates
    stds = dict(zip(comparison.schemes, comparison.stds, strict=True))
    results = {start: at_best_rate(comparison, start) for start in comparison.schemes}
    trained = sorted(
        (start for start in results if math.isfinite(results[start].mean)), key=lambda s: results[s].mean
    )
    if not trained:
        return [_nothing_trains(comparison)]
    best = trained[0]
    sharpness = rate * comparison.norm(best, rate)
    where = "" if math.isnan(sharpness) else f", where lr·‖H‖ = {format_number(sharpness)} at the start"
    sentences = [f"The loss is lowest at std {stds[best]:g}: {format_result(results[best])}{where}."]
    tied = [f"{stds[start]:g}" for start in trained[1:] if results[start].ties_with(results[best])]
    if tied:
        verb = "ties" if len(tied) == 1 else "tie"
        how = ", the same loss" if math.isnan(results[best].error) else ", within two standard errors"
        sentences.append(f"std {join_names(tied)} {verb} with it{how}.")
    broken = [start for start in comparison.schemes if comparison.diverged(start, rate)]
    at_all = [f"{stds[start]:g}" for start in broken if _all_diverged(comparison, start, [rate])]
    if at_all:
        verb = "diverges" if len(at_all) == 1 else "diverge"
        sentences.append(f"std {join_names(at_all)} {verb}.")
    for start in broken:
        if not _all_diverged(comparison, start, [rate]):
            seeds = f"{comparison.diverged(start, rate)} of {len(comparison.seeds)} seeds"
            sentences.append(f"std {stds[start]:g} diverges with {seeds}.")
    return sentences
