"""What a comparison says, in sentences: who wins, who forgives a wrong rate, and what was done."""

from __future__ import annotations

import math
import re

from hessinit.present.comparison_standing import (
    Result,
    at_best_rate,
    best_rate,
    ordered_starts,
    regrets,
    trains,
)
from hessinit.present.numbers import format_number, format_ratio, join_names, printable
from hessinit.report.comparison import Comparison

MOST_NOTES = 6


def conclude_comparison(comparison: Comparison) -> str:
    """Say who wins at its best rate and who loses least over all rates; ties are called ties."""
    if comparison.kind == "sweep":
        return " ".join(_conclude_sweep(comparison))
    return " ".join((*_winner(comparison), *_most_forgiving(comparison), *_never(comparison)))


def describe_runs(comparison: Comparison) -> str:
    """Say how many runs there were, of what, and how long they took."""
    counts = [
        _count(len(comparison.starts), "std" if comparison.kind == "sweep" else "start"),
        _count(len(comparison.learning_rates), "rate"),
        _count(len(comparison.seeds), "seed"),
    ]
    total = len(comparison.runs)
    spent = f" in {format_number(comparison.seconds, 2)} s" if comparison.seconds is not None else ""
    examples = f"{comparison.examples:,} example{'' if comparison.examples == 1 else 's'}"
    warmup = f", +warmup over {comparison.warmup} steps" if comparison.warmup else ""
    return (
        f"{' × '.join(counts)} = {_count(total, 'run')} of {_count(comparison.steps, 'step')}{spent}: "
        f"{printable(comparison.optimizer)}{warmup}, batches of {comparison.batch_size} from {examples}."
    )


def explain_comparison(comparison: Comparison, *, short: bool = False) -> str:
    """Say what the numbers of the table are; a `short` table has no errors, and marks for words."""
    error = ", ± standard error over seeds" if len(comparison.seeds) > 1 and not short else ""
    loss = f"the training loss over the last tenth of the steps{error}"
    if comparison.kind == "sweep":
        return f"‖H‖ of each layer at the start, and {loss}; * the lowest."
    marks = "* the lowest at that rate; ✗ diverged" if short else "* the lowest at that rate"
    curvature = " ‖H‖: the network at the start." if comparison.layers else ""
    return f"Final loss: {loss}; {marks}.{curvature}"


def collect_notes(comparison: Comparison) -> list[str]:
    """The notes of the comparison and of its runs; those that differ in their numbers only are shown once."""
    alike: dict[tuple[str, str], list[str]] = {}
    for run in comparison.runs:
        if run.note:
            alike.setdefault((run.start, re.sub(r"\d[\d.,e+-]*", "#", run.note)), []).append(run.note)
    notes = list(map(_stopped, comparison.notes))
    for (start, _), found in alike.items():
        runs = sum(run.start == start for run in comparison.runs)
        which = "" if len(set(found)) == 1 else ", for example"
        where = (
            "does not apply" if not comparison.applies(start) else f"in {len(found)} of {_count(runs, 'run')}"
        )
        notes.append(f"{start} {where}{which}: {_stopped(found[0])}")
    if len(notes) > MOST_NOTES:
        notes = [*notes[: MOST_NOTES - 1], f"{len(notes) - MOST_NOTES + 1} more are in the runs."]
    return [printable(note) for note in notes]


def format_result(result: Result) -> str:
    """A mean with three figures, and its standard error, where there is one, with as many decimals.

    >>> format_result(Result(0.23456, 0.0123)), format_result(Result(0.2, float("nan"))), format_result(
    ...     Result(12345678.0, 230.0))
    ('0.235 ± 0.012', '0.200', '1.2e+07 ± 230')
    """
    size = abs(float(f"{result.mean:.2e}")) if math.isfinite(result.mean) else math.inf
    if not 1e-4 <= size < 1e5:
        error = "" if math.isnan(result.error) else f" ± {format_number(result.error, 2)}"
        return format_number(result.mean) + error
    decimals = max(0, 2 - math.floor(math.log10(size)))
    error = "" if math.isnan(result.error) else f" ± {result.error:.{decimals}f}"
    return f"{result.mean:.{decimals}f}{error}"


def _winner(comparison: Comparison) -> list[str]:
    standing = {start: at_best_rate(comparison, start) for start in ordered_starts(comparison)}
    trained = [start for start, result in standing.items() if math.isfinite(result.mean)]
    if not trained:
        return ["No start trains at any of these rates; try lower ones."]
    best = trained[0]

    def where(start: str) -> str:
        rate = format_number(best_rate(comparison, start))
        return f"{format_result(standing[start])} at lr {rate}"

    if len(trained) == 1:
        others = " alone" if len(standing) > 1 else ""
        return [f"{printable(best)}{others} trains: {where(best)}."]
    tied = [start for start in trained[1:] if standing[start].ties_with(standing[best])]
    if tied:
        second = tied[0] if len(tied) == 1 else ""
        against = f" and {where(second)}" if second else ""
        result = f"{where(best)}{against}, within two standard errors"
        return [f"{join_names([best, *tied])} tie at their best rates: {result}."]
    doubt = " (one seed: no error bars)" if len(comparison.seeds) == 1 else ""
    following = f"next {printable(trained[1])}, {where(trained[1])}"
    return [f"{printable(best)} wins at its best rate{doubt}: {where(best)}; {following}."]


def _most_forgiving(comparison: Comparison) -> list[str]:
    found = regrets(comparison)
    if len(comparison.learning_rates) < 2 or len(found) < 2:
        return []
    best, second = sorted(found, key=lambda start: found[start].mean)[:2]
    # The mean of logarithms is a little below the logarithm of the mean: what wins everywhere is at 1.00.
    times = [format_ratio(math.exp(max(0.0, found[start].mean))) for start in (best, second)]
    tie = ", within two standard errors of it" if found[second].ties_with(found[best]) else ""
    forgiving = f"{printable(best)} is the most forgiving over the {len(comparison.learning_rates)} rates"
    average = f"on average {times[0]} times the loss of the best start at each"
    return [f"{forgiving}: {average}; next {printable(second)}, {times[1]} times{tie}."]


def _never(comparison: Comparison) -> list[str]:
    never = [
        start
        for start in comparison.starts
        if comparison.applies(start) and math.isnan(best_rate(comparison, start))
    ]
    if not never or not any(best_rate(comparison, start) > 0 for start in comparison.starts):
        return []  # that none does at all is said already
    verb = "trains" if len(never) == 1 else "train"
    return [f"{join_names(never)} {verb} at none of these rates."]


def _conclude_sweep(comparison: Comparison) -> list[str]:
    (rate,) = comparison.learning_rates
    stds = dict(zip(comparison.starts, comparison.stds, strict=True))
    results = {start: at_best_rate(comparison, start) for start in comparison.starts}
    trained = sorted(
        (start for start in results if math.isfinite(results[start].mean)), key=lambda s: results[s].mean
    )
    if not trained:
        return [f"No std trains at lr {format_number(rate)}; try a lower rate."]
    best = trained[0]
    sharpness = rate * comparison.norm(best, rate)
    where = "" if math.isnan(sharpness) else f", where lr·‖H‖ = {format_number(sharpness)} at the start"
    sentences = [f"The loss is lowest at std {stds[best]:g}: {format_result(results[best])}{where}."]
    tied = [f"{stds[start]:g}" for start in trained[1:] if results[start].ties_with(results[best])]
    if tied:
        verb = "ties" if len(tied) == 1 else "tie"
        sentences.append(f"std {join_names(tied)} {verb} with it, within two standard errors.")
    broken = [f"{stds[start]:g}" for start in comparison.starts
              if comparison.applies(start) and not trains(comparison, start, rate)]  # fmt: skip
    if broken:
        verb = "diverges" if len(broken) == 1 else "diverge"
        sentences.append(f"std {join_names(broken)} {verb}.")
    return sentences


def _count(many: int, what: str) -> str:
    return f"{many:,} {what}{'' if many == 1 else 's'}"


def _stopped(note: str) -> str:
    return note if note.endswith((".", "!", "?")) else f"{note}."
