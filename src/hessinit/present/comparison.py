"""The document of a comparison of initialization schemes, or of a sweep of standard deviations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeVar

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.results.comparison import MOST_POINTS, NETWORK, Comparison, Run, window

OURS = "hessinit"
RATES_WITH_ERRORS = 3  # beside more losses there is no room for standard errors
T = TypeVar("T")


@dataclass(frozen=True)
class LossAxis:
    """Where a loss axis ends.

    It ends at so many times the untrained loss, or a diverging curve would flatten all others. In a
    sweep large weights begin far above it, and their descent is what the chart is about.
    """

    compare: float = 3.0
    sweep: float = 30.0
    least: float = 1e-12  # a loss of exactly 0 is drawn here on a logarithmic axis


LOSS_AXIS = LossAxis()


def describe_comparison(comparison: Comparison) -> doc.Document:
    """Return the verdict, the charts, the table of all results and the settings."""
    title = "Comparison of initialization schemes"
    losses = doc.Section("Scheme and learning rate", [_heat_map(comparison)])
    if comparison.kind == "sweep":
        title = "Sweep of standard deviations"
        losses = doc.Section("Curvature and loss", [_final_losses(comparison)])
    return doc.Document(
        title=w.title(title, comparison.settings),
        answer=_nothing_trains(comparison),
        verdict=conclude_comparison(comparison),
        numbers=_key_numbers(comparison),
        picture=("heat map", "final losses", "losses"),
        sections=doc.filled(
            losses,
            doc.Section("Loss curves", _loss_curves(comparison)),
            doc.Section("All results", _result_blocks(comparison)),
        ),
        footer=w.write_versions(
            f"Seeds {', '.join(map(str, comparison.seeds))}", comparison.versions
        ),
    )


def rank_schemes(comparison: Comparison) -> list[str]:
    """Return the schemes by the lowest loss; last those that do not apply to the model."""

    def lowest(scheme: str) -> float:
        losses = (_trained_loss(comparison, scheme, rate) for rate in comparison.learning_rates)
        return min((loss for loss in losses if not math.isnan(loss)), default=math.inf)

    return sorted(
        comparison.schemes, key=lambda scheme: (not comparison.applies(scheme), lowest(scheme))
    )


def best_scheme(comparison: Comparison, rate: float) -> str | None:
    """Return the scheme of the lowest loss at this rate; None where none learns."""
    trained = [scheme for scheme in comparison.schemes if comparison.learns(scheme, rate)]
    return min(trained, key=lambda scheme: comparison.loss(scheme, rate), default=None)


def conclude_comparison(comparison: Comparison) -> list[str]:
    """Return which scheme has the lowest loss, which one is robust, and which do not train."""
    trained = comparison.learners
    if not trained:
        return []
    doubt = w.text_if(len(comparison.seeds) == 1, " (one seed: no error bars)")
    best = _write_best(comparison, trained[0])
    sentence = f"{w.shorten(trained[0])} has the lowest final loss{doubt}: {best}"
    if len(trained) > 1:
        tie = w.text_if(_ties(comparison, *trained[:2]), ", within two standard errors")
        sentence += f"; next {w.shorten(trained[1])}, {_write_best(comparison, trained[1])}{tie}"
    return [f"{sentence}.", *_name_robust(comparison), *_name_failures(comparison)]


def _name_failures(comparison: Comparison) -> Iterator[str]:
    rates = {s: comparison.best_rate(s) for s in rank_schemes(comparison) if comparison.applies(s)}
    where = "any learning rate"
    if len(comparison.learning_rates) == 1:
        where = f"lr {w.format_number(comparison.learning_rates[0])}"
    if failed := [scheme for scheme, rate in rates.items() if math.isnan(rate)]:
        verb = w.inflect(failed, "does", "do")
        yield f"{w.join_names(failed)} {verb} not train with every seed at {where}."
    if idle := [s for s in rates if s not in failed and s not in comparison.learners]:
        verb = w.inflect(idle, "does", "do")
        yield (
            f"{w.join_names(idle)} {verb} not learn in {w.count(comparison.steps, 'step')} at "
            f"{where}: the loss ends no lower than {_name_chance(comparison)}."
        )


def _any_idle(comparison: Comparison) -> bool:
    pairs = [(scheme, rate) for scheme in comparison.schemes for rate in comparison.learning_rates]
    return any(comparison.trains(*pair) and not comparison.learns(*pair) for pair in pairs)


def _name_chance(comparison: Comparison) -> str:
    """Name the loss of a network that has learned nothing."""
    chance = comparison.constant_loss
    if chance is None:
        return "that of a constant output"
    first = w.text_if(any(run.first_loss < chance for run in comparison.runs), "the first one or ")
    return f"{first}that of a constant output ({w.format_number(chance)})"


def _ties(comparison: Comparison, best: str, second: str) -> bool:
    pairs = [(scheme, comparison.best_rate(scheme)) for scheme in (best, second)]
    losses = [comparison.loss(*pair) for pair in pairs]
    errors = [comparison.error(*pair) for pair in pairs]
    return abs(losses[0] - losses[1]) <= 2 * math.hypot(*errors)  # False for nan


def _name_robust(comparison: Comparison) -> Iterator[str]:
    """Of the schemes that train wherever another one does, name the nearest to the lowest loss."""
    best = {rate: best_scheme(comparison, rate) for rate in comparison.learning_rates}
    lowest = {
        rate: comparison.loss(scheme, rate) for rate, scheme in best.items() if scheme is not None
    }
    robust = [s for s in comparison.schemes if all(comparison.learns(s, rate) for rate in lowest)]
    if len(lowest) < 2 or len(comparison.schemes) < 2 or not robust:
        return
    # A difference: a ratio would depend on a constant in the loss.
    above = {s: statistics.fmean(comparison.loss(s, r) - lowest[r] for r in lowest) for s in robust}
    scheme = min(above, key=above.__getitem__)
    yield (
        f"{w.shorten(scheme)} trains wherever another scheme does ({len(lowest)} rates): its loss "
        f"is {w.format_number(above[scheme])} above the lowest at each rate, on average."
    )


def _write_best(comparison: Comparison, scheme: str) -> str:
    rate = comparison.best_rate(scheme)
    loss = w.format_mean(comparison.loss(scheme, rate), comparison.error(scheme, rate))
    return f"{loss} at lr {w.format_number(rate)}"


def _nothing_trains(comparison: Comparison) -> str:
    """Return why there is no result; "" where a scheme learns."""
    if comparison.learners:
        return ""
    runs = [run for run in comparison.runs if run.applies]
    if not runs:
        return "No scheme applies to this model; the notes say why."
    if not any(math.isfinite(run.first_loss) for run in runs):
        return (
            "No scheme trains: the initial loss is not finite. Check the data, the loss and the "
            "weights."
        )
    rates = w.join_names([w.format_number(rate) for rate in comparison.learning_rates])
    if all(math.isnan(comparison.best_rate(scheme)) for scheme in comparison.schemes):
        return f"No scheme trains with every seed at lr {rates}; try a lower rate."
    return (
        f"No scheme learns at lr {rates}: every loss ends no lower than "
        f"{_name_chance(comparison)}. Try more steps or other learning rates."
    )


def _key_numbers(comparison: Comparison) -> list[doc.KeyNumber]:
    if not comparison.learners:
        return []
    scheme = comparison.learners[0]
    numbers = [
        doc.KeyNumber("lowest final loss", w.shorten(scheme), _write_best(comparison, scheme))
    ]
    rate = comparison.best_rate(scheme)
    sharpness = rate * comparison.norm(scheme, rate)
    if not math.isnan(sharpness):
        numbers.append(doc.KeyNumber("lr·‖H‖ at initialization", w.format_number(sharpness)))
    return numbers


def _result_blocks(comparison: Comparison) -> list[doc.Block]:
    columns = {"sweep": _sweep_columns, "compare": _scheme_columns}[comparison.kind]
    blocks: list[doc.Block] = [
        doc.Table("Final losses", columns(comparison)),
        doc.Paragraph(_explain_losses(comparison), "small"),
        doc.Paragraph(_describe_runs(comparison), "small"),
        *w.note_paragraphs(collect_notes(comparison)),
    ]
    settings = {name: value for name, value in comparison.settings.items() if value is not None}
    if settings:
        blocks.append(doc.Facts("Settings", w.write_pairs(settings)))
    return blocks


def _explain_losses(comparison: Comparison) -> str:
    last = min(comparison.steps, window(comparison.steps))
    error = w.text_if(_has_errors(comparison), ", ± its standard error over seeds")
    diverged = w.text_if(any(run.diverged for run in comparison.runs), "; ✗ diverged (seeds)")
    chance = f"; ° does not learn: no lower than {_name_chance(comparison)}"
    norms = w.text_if(any(run.norms for run in comparison.runs), " ‖H‖: at initialization.")
    return (
        f"Final loss: the mean training loss of the last {last} steps{error}; * lowest{diverged}"
        f"{w.text_if(_any_idle(comparison), chance)}.{norms}"
    )


def _describe_runs(comparison: Comparison) -> str:
    noun = {"sweep": "std", "compare": "scheme"}[comparison.kind]
    runs = (
        f"{w.count(len(comparison.schemes), noun)} × "
        f"{w.count(len(comparison.learning_rates), 'rate')} × "
        f"{w.count(len(comparison.seeds), 'seed')} = {w.count(len(comparison.runs), 'run')}"
    )
    optimizer = comparison.optimizer.removeprefix("__main__.")
    if "<" in optimizer:  # a lambda or a local function
        optimizer = "your optimizer"
    return (
        f"{runs} of {w.count(comparison.steps, 'step')}{w.tell_time(comparison.seconds)}: "
        f"{optimizer}{w.text_if(comparison.warmup, f', +warmup over {comparison.warmup} steps')}, "
        f"batches of {comparison.batch_size} from {w.count(comparison.examples, 'example')}."
    )


def collect_notes(comparison: Comparison) -> list[str]:
    """Return the notes of the comparison, and for each scheme the first one of its runs."""
    sentences = [f"{w.unstopped(note)}." for note in comparison.notes]
    for scheme in comparison.schemes:
        runs = [run for run in comparison.runs if run.scheme == scheme]
        if notes := [run.note for run in runs if run.note]:
            where = "does not apply"
            if comparison.applies(scheme):
                where = f"in {len(notes)} of {w.count(len(runs), 'run')}"
            example = w.text_if(len(set(notes)) > 1, ", for example")
            sentences.append(f"{scheme} {where}{example}: {w.unstopped(notes[0])}.")
    return sentences


def _scheme_columns(comparison: Comparison) -> list[doc.Column]:
    schemes = rank_schemes(comparison)
    rates = comparison.learning_rates
    best_rates = [comparison.best_rate(scheme) for scheme in schemes]
    best = 0 if math.isnan(best_rates[0]) else rates.index(best_rates[0])
    columns = [w.name_column("scheme", schemes)]
    for position, rate in enumerate(rates):
        # A narrow terminal leaves out the rates farthest from the best one, and never that one.
        distance = abs(position - best)
        importance = {0: 8}.get(distance, max(1, 7 - distance))
        heading = f"lr {w.format_number(rate)}"
        columns.append(loss_column(comparison, schemes, rate, heading, importance))
    columns.append(
        doc.Column(
            "‖H‖",
            [_write_norms(comparison, scheme) for scheme in schemes],
            4,
            keys=[comparison.norm(scheme) for scheme in schemes],
        )
    )
    if len(rates) > 1:
        shown = [w.format_range([rate]) or "–" for rate in best_rates]
        columns.append(doc.Column("best lr", shown, 8, keys=best_rates))
    return columns


def _write_norms(comparison: Comparison, scheme: str) -> str:
    """Write the network's norm; a range where the scheme chooses its weights by the rate."""
    if scheme not in comparison.rate_dependent:
        return w.format_range([comparison.norm(scheme)])
    return w.format_range(
        [comparison.norm(scheme, rate) for rate in comparison.learning_rates], " … "
    )


def _sweep_columns(comparison: Comparison) -> list[doc.Column]:
    (rate,) = comparison.learning_rates
    norms = {
        layer: [comparison.norm(scheme, rate, layer) for scheme in comparison.schemes]
        for layer in (*comparison.layers, NETWORK)
    }
    norms["lr·‖H‖"] = [rate * norm for norm in norms[NETWORK]]
    columns = [doc.Column("std", [f"{std:g}" for std in comparison.stds], 9, keys=comparison.stds)]
    for heading, values in norms.items():
        importance = {NETWORK: 6, "lr·‖H‖": 7}.get(heading, 4)
        columns.append(
            doc.Column(
                heading, [w.format_range([value]) for value in values], importance, keys=values
            )
        )
    heading = f"loss after {comparison.steps:,} steps"
    return [*columns, loss_column(comparison, comparison.schemes, rate, heading)]


def loss_column(
    comparison: Comparison, schemes: Sequence[str], rate: float, heading: str, importance: int = 8
) -> doc.Column:
    """Return the final losses at one rate, in which the lowest and the diverged ones are marked."""
    best = best_scheme(comparison, rate)
    marks = [
        "diverged" if comparison.diverged(scheme, rate) else w.text_if(scheme == best, "best")
        for scheme in schemes
    ]
    return doc.Column(
        heading,
        [
            _write_loss(comparison, scheme, rate, _has_errors(comparison)) + "*" * (scheme == best)
            for scheme in schemes
        ],
        importance,
        keys=[_trained_loss(comparison, scheme, rate) for scheme in schemes],
        marks=marks,
    )


def _has_errors(comparison: Comparison) -> bool:
    return len(comparison.seeds) > 1 and len(comparison.learning_rates) <= RATES_WITH_ERRORS


def _write_loss(comparison: Comparison, scheme: str, rate: float, errors: bool = False) -> str:
    runs = [run for run in comparison.runs_of(scheme, rate) if run.applies]
    if not runs:
        return "–"
    if diverged := sum(run.diverged for run in runs):
        return f"✗{w.text_if(len(runs) > 1, f' {diverged}/{len(runs)}')}"
    error = comparison.error(scheme, rate) if errors else math.nan
    idle = w.text_if(not comparison.learns(scheme, rate), "°")
    return w.format_mean(comparison.loss(scheme, rate), error) + idle


def _trained_loss(comparison: Comparison, scheme: str, rate: float) -> float:
    return comparison.loss(scheme, rate) if comparison.trains(scheme, rate) else math.nan


def _heat_map(comparison: Comparison) -> doc.HeatMap:
    schemes = rank_schemes(comparison)
    rates = comparison.learning_rates

    def cells(write: Callable[[Comparison, str, float], T]) -> list[list[T]]:
        return [[write(comparison, scheme, rate) for rate in rates] for scheme in schemes]

    best = {rate: best_scheme(comparison, rate) for rate in rates}
    lowest = [f"lr {w.format_number(rate)}: {best[rate] or 'none trains'}" for rate in rates]
    losses = cells(_trained_loss)
    shown = [loss for row in losses for loss in row if not math.isnan(loss)]
    signs = ["✗: diverged"] * any(run.diverged for run in comparison.runs)
    signs += ["°: does not learn"] * _any_idle(comparison)
    legend = w.text_if(signs, f" ({', '.join(signs)})")
    return doc.HeatMap(
        "heat map",
        f"Final loss{legend}",
        "Final loss for each scheme and learning rate. Lowest, with a frame, at "
        f"{'; '.join(lowest)}.",
        schemes,
        [w.format_number(rate) for rate in rates],
        losses,
        cells(_write_loss),
        *("learning rate", "scheme", "final loss"),
        log_color=bool(shown) and min(shown) > 0,
        details=cells(_describe_cell),
        marked=cells(lambda _, scheme, rate: best[rate] == scheme),
    )


def _describe_cell(comparison: Comparison, scheme: str, rate: float) -> str:
    if not comparison.applies(scheme):
        return "does not apply to this model"
    pieces = []
    seeds = w.count(len(comparison.seeds), "seed")
    error = comparison.error(scheme, rate)
    norm = comparison.norm(scheme, rate)
    if comparison.trains(scheme, rate) and not comparison.learns(scheme, rate):
        pieces.append("does not learn")
    if diverged := comparison.diverged(scheme, rate):
        pieces.append(f"{diverged} of {seeds} diverged")
    elif not math.isnan(error):
        pieces.append(f"± {w.format_number(error, 2)} over {seeds}")
    if not math.isnan(norm):
        pieces.append(f"lr·‖H‖ = {w.format_number(rate * norm)} at initialization")
    return "; ".join(pieces)


def _final_losses(comparison: Comparison) -> doc.LineChart:
    """Return the final loss of each std over lr·‖H‖; over the std where ‖H‖ is unknown."""
    (rate,) = comparison.learning_rates
    label = "lr·‖H‖ at initialization"
    xs = [rate * comparison.norm(scheme, rate) for scheme in comparison.schemes]
    rules = []
    if any(map(math.isnan, xs)):
        label = "std of the weights"
        xs = list(comparison.stds)
    elif comparison.optimizer == "sgd":
        # Above it gradient descent diverges on a quadratic; other optimizers have other limits.
        rules.append(doc.ReferenceLine(2.0, "lr·‖H‖ = 2", upright=True))
    schemes = comparison.schemes
    losses = [_trained_loss(comparison, scheme, rate) for scheme in schemes]
    ends = [f"{scheme} {_write_loss(comparison, scheme, rate)}" for scheme in schemes]
    return doc.LineChart(
        "final losses",
        f"Final loss over {label}",
        f"Final losses: {', '.join(ends)}.",
        [_final_loss(comparison, s, rate, x) for s, x in zip(schemes, xs, strict=True)],
        "final loss",
        label,
        rules=rules,
        log_x=min(xs) > 0,
        log_y=w.spans_much([loss for loss in losses if not math.isnan(loss)]),
    )


def _final_loss(comparison: Comparison, scheme: str, rate: float, x: float) -> doc.Series:
    """Return one point, with its standard error; a cross where the scheme diverges."""
    loss = _trained_loss(comparison, scheme, rate)
    details = [_describe_cell(comparison, scheme, rate)]
    if math.isnan(loss):
        return w.crosses(scheme, [math.inf], [x], "vermilion", details=details)
    point = doc.Series(scheme, [loss], [x], points=True, in_legend=False, details=details)
    error = comparison.error(scheme, rate)
    if math.isnan(error):
        return point
    return replace(point, low=[loss - error], high=[loss + error])


def _loss_curves(comparison: Comparison) -> list[doc.Block]:
    """Return the loss over the steps, of each scheme at its best rate.

    Where a scheme trains at no rate, that at the lowest one is shown.
    """
    schemes: Sequence[str] = rank_schemes(comparison)
    looks = w.looks(comparison.schemes)
    if comparison.kind == "sweep":
        schemes = comparison.schemes
        colors = zip(schemes, w.ramp(comparison.stds), strict=True)
        looks = {scheme: (color, False) for scheme, color in colors}
    series = []
    ends = []
    for scheme in schemes:
        rate = comparison.best_rate(scheme)
        if math.isnan(rate):
            rate = min(comparison.learning_rates)
        if runs := [run for run in comparison.runs_of(scheme, rate) if run.applies]:
            several_rates = len(comparison.learning_rates) > 1
            name = scheme + w.text_if(several_rates, f", lr {w.format_number(rate)}")
            series += loss_series(runs, comparison.steps, name, looks[scheme])
            ends.append(f"{name} {_write_loss(comparison, scheme, rate)}")
    charts = loss_charts(
        "losses",
        "Loss of each scheme at its best learning rate",
        f"Training loss over the steps. Final losses: {', '.join(ends)}.",
        series,
        [run.first_loss for run in comparison.runs],
        getattr(LOSS_AXIS, comparison.kind),
    )
    legend = "Lines are medians over seeds, bands their ranges; crosses mark divergence."
    return [doc.Paragraph(legend, page_only=True), *charts] if charts else []


def loss_charts(
    name: str,
    caption: str,
    description: str,
    series: Sequence[doc.Series],
    first_losses: Iterable[float],
    headroom: float = LOSS_AXIS.compare,
) -> list[doc.LineChart]:
    """Return a chart of losses up to `headroom` times the lowest first one.

    There is none where no loss is below that. hessinit's own curves are drawn whole, however high
    they begin.
    """
    untrained = min(filter(math.isfinite, first_losses), default=math.inf)
    ours = [curve for curve in series if curve.name.startswith(OURS)]
    heights = [y for curve in ours for y in _heights(curve)]
    top = max(untrained + (headroom - 1) * abs(untrained), *heights, -math.inf)
    lines = [curve for curve in series if not curve.points]
    shown = [y for line in lines for y in line.y if y is not None and y <= top]
    if not shown:
        return []
    shown += heights
    low = min(shown)
    high = max(shown)
    log_y = w.spans_much(shown)
    if log_y:
        low = max(low, LOSS_AXIS.least) / 1.15
        high = max(high, LOSS_AXIS.least) * 1.15
    else:
        room = 0.05 * (high - low or abs(high) or 1.0)
        low -= room
        high += room
    # A cross stays at the edge where its line leaves the axis.
    drawn = [
        replace(curve, y=[math.inf]) if curve.points and (curve.y[0] or 0) > high else curve
        for curve in series
    ]
    return [
        doc.LineChart(
            name,
            caption,
            description,
            drawn,
            "training loss",
            "step",
            log_y=log_y,
            y_range=(low, high),
        )
    ]


def _heights(curve: doc.Series) -> list[float]:
    """Return the finite values of a curve, and those of its upper range."""
    return [y for y in (*curve.y, *(curve.high or ())) if y is not None and math.isfinite(y)]


def loss_series(
    runs: Sequence[Run], steps: int, name: str, look: tuple[doc.Color, bool]
) -> list[doc.Series]:
    """Return the median loss with the range over the seeds that finish.

    Where others diverge, a cross follows.
    """
    chunk = math.ceil(steps / MOST_POINTS)  # of steps: a point is at its middle
    middles = [(k * chunk + min(steps, (k + 1) * chunk)) / 2 for k in range(MOST_POINTS)]
    curves = [(run, list(takewhile(math.isfinite, run.losses[:MOST_POINTS]))) for run in runs]
    finished = [losses for run, losses in curves if run.finite]
    columns = list(zip(*(finished or [losses for _, losses in curves]), strict=False))
    line = doc.Series(name, list(map(statistics.median, columns)), middles[: len(columns)], *look)
    if len(runs) > 1:
        line = replace(line, low=list(map(min, columns)), high=list(map(max, columns)))
    diverged = [losses for run, losses in curves if run.diverged]
    if not diverged:
        return [line]
    longest = max(diverged, key=len)
    step, loss = (middles[len(longest) - 1], longest[-1]) if longest else (0.0, math.inf)
    details = [f"{len(diverged)} of {w.count(len(runs), 'seed')} diverged"]
    return [line, w.crosses(name, [loss], [step], *look, details)]
