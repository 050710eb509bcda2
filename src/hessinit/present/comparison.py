"""The document of a comparison of initialization schemes, or of a sweep of standard deviations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.results.comparison import MOST_POINTS, NETWORK, Comparison, Run, window

RATES_WITH_ERRORS = 3  # beside more losses there is no room for standard errors
SGD_LIMIT = (
    2.0  # lr·‖H‖ above which gradient descent diverges on a quadratic; other optimizers differ
)
# Loss axes end at so many times the untrained loss, or a diverging curve would flatten all others.
# In a sweep large weights begin far above it, and their descent is what the chart is about.
HEADROOM = {"compare": 3.0, "sweep": 30.0}
OURS = "hessinit"
LEAST = 1e-12  # a loss of exactly 0 is drawn here on a logarithmic axis


def describe_comparison(comparison: Comparison) -> doc.Document:
    """Return the verdict, the charts, the table of all results and the settings."""
    is_sweep = comparison.kind == "sweep"
    settings = {name: value for name, value in comparison.settings.items() if value is not None}
    facts = [doc.Facts("Settings", w.write_pairs(settings))] if settings else []
    title = "Sweep of standard deviations" if is_sweep else "Comparison of initialization schemes"
    losses = _final_losses(comparison) if is_sweep else _heat_map(comparison)
    curves = [doc.Section("Loss curves", found)] if (found := _loss_curves(comparison)) else []
    learns = any_learns(comparison)
    return doc.Document(
        title=w.title(title, comparison.settings),
        answer="" if learns else _nothing_trains(comparison),
        verdict=conclude_comparison(comparison),
        numbers=_key_numbers(comparison),
        picture=(losses.name, "losses"),
        sections=[
            doc.Section("Curvature and loss" if is_sweep else "Scheme and learning rate", [losses]),
            *curves,
            doc.Section("All results", [*_table_blocks(comparison), *facts]),
        ],
        footer=w.write_versions(
            f"Seeds {', '.join(map(str, comparison.seeds))}", comparison.versions
        ),
    )


def rank_schemes(comparison: Comparison) -> list[str]:
    """Return the schemes by their loss at their own best rate; last those that do not apply to the model."""

    def place(scheme: str) -> tuple[bool, float]:
        rate = comparison.best_rate(scheme)
        return not comparison.applies(scheme), math.inf if math.isnan(rate) else comparison.loss(
            scheme, rate
        )

    return sorted(comparison.schemes, key=place)


def best_scheme(comparison: Comparison, rate: float) -> str | None:
    trained = [scheme for scheme in comparison.schemes if comparison.learns(scheme, rate)]
    return min(trained, key=lambda scheme: comparison.loss(scheme, rate), default=None)


def conclude_comparison(comparison: Comparison) -> list[str]:
    """Return which scheme has the lowest loss, at one rate and over all of them, and which do not train."""
    ranked = rank_schemes(comparison)
    rates = {scheme: comparison.best_rate(scheme) for scheme in ranked}
    if not (trained := [scheme for scheme in ranked if scheme_learns(comparison, scheme)]):
        return []
    best, *others = map(w.shorten, trained)
    doubt = " (one seed: no error bars)" if len(comparison.seeds) == 1 else ""
    said = f"{best} has the lowest final loss{doubt}: {_write_best(comparison, trained[0])}"
    if others:
        tie = ", within two standard errors" if _ties(comparison, *trained[:2]) else ""
        said = f"{said}; next {others[0]}, {_write_best(comparison, trained[1])}{tie}"
    failed = [
        scheme for scheme in ranked if math.isnan(rates[scheme]) and comparison.applies(scheme)
    ]
    idle = [scheme for scheme in ranked if scheme not in trained and not math.isnan(rates[scheme])]
    (first, *more) = comparison.learning_rates
    verb = w.agree(failed, "does", "do")
    where = "any learning rate" if more else f"lr {w.format_number(first)}"
    fails = (
        [f"{w.join_names(failed)} {verb} not train with every seed at {where}."] if failed else []
    )
    if idle:
        verb = w.agree(idle, "does", "do")
        steps = w.count(comparison.steps, "step")
        fails.append(
            f"{w.join_names(idle)} {verb} not learn in {steps} at {where}: the loss ends no lower than "
            f"{_name_chance(comparison)}."
        )
    return [f"{said}.", *_name_robust(comparison), *fails]


def _any_idle(comparison: Comparison) -> bool:
    pairs = [(scheme, rate) for scheme in comparison.schemes for rate in comparison.learning_rates]
    return any(comparison.trains(*pair) and not comparison.learns(*pair) for pair in pairs)


def _name_chance(comparison: Comparison) -> str:
    chance = comparison.constant_loss
    loss = "" if chance is None else f" ({w.format_number(chance)})"
    begins_below = chance is not None and any(run.first_loss < chance for run in comparison.runs)
    return f"{'the first one or ' * begins_below}that of a constant output{loss}"


def any_learns(comparison: Comparison) -> bool:
    return any(scheme_learns(comparison, scheme) for scheme in comparison.schemes)


def scheme_learns(comparison: Comparison, scheme: str) -> bool:
    rate = comparison.best_rate(scheme)
    return not math.isnan(rate) and comparison.learns(scheme, rate)


def _ties(comparison: Comparison, one: str, other: str) -> bool:
    rates = [(scheme, comparison.best_rate(scheme)) for scheme in (one, other)]
    difference = abs(comparison.loss(*rates[0]) - comparison.loss(*rates[1]))
    return difference <= 2 * math.hypot(
        *(comparison.error(*pair) for pair in rates)
    )  # False for nan


def _name_robust(comparison: Comparison) -> list[str]:
    """Of the schemes that train wherever another one does, name the one nearest to the lowest losses."""
    best = {rate: best_scheme(comparison, rate) for rate in comparison.learning_rates}
    lowest = {
        rate: comparison.loss(scheme, rate) for rate, scheme in best.items() if scheme is not None
    }
    robust = [s for s in comparison.schemes if all(comparison.learns(s, rate) for rate in lowest)]
    if len(lowest) < 2 or len(comparison.schemes) < 2 or not robust:
        return []
    # A difference: a ratio would depend on a constant in the loss.
    above = {s: statistics.fmean(comparison.loss(s, r) - lowest[r] for r in lowest) for s in robust}
    scheme = min(above, key=above.__getitem__)
    average = (
        f"its loss is {w.format_number(above[scheme])} above the lowest at each rate, on average"
    )
    return [
        f"{w.shorten(scheme)} trains wherever another scheme does ({len(lowest)} rates): {average}."
    ]


def _write_best(comparison: Comparison, scheme: str) -> str:
    rate = comparison.best_rate(scheme)
    loss = w.format_mean(comparison.loss(scheme, rate), comparison.error(scheme, rate))
    return f"{loss} at lr {w.format_number(rate)}"


def _nothing_trains(comparison: Comparison) -> str:
    if not (runs := [run for run in comparison.runs if run.applies]):
        return "No scheme applies to this model; the notes say why."
    if not any(math.isfinite(run.first_loss) for run in runs):
        return "No scheme trains: the initial loss is not finite. Check the data, the loss and the weights."
    rates = w.join_names([w.format_number(rate) for rate in comparison.learning_rates])
    if not all(math.isnan(comparison.best_rate(scheme)) for scheme in comparison.schemes):
        return (
            f"No scheme learns at lr {rates}: every loss ends no lower than {_name_chance(comparison)}. "
            "Try more steps or other learning rates."
        )
    return f"No scheme trains with every seed at lr {rates}; try a lower rate."


def _key_numbers(comparison: Comparison) -> list[doc.KeyNumber]:
    scheme = rank_schemes(comparison)[0]
    rate = comparison.best_rate(scheme)
    if not scheme_learns(comparison, scheme):
        return []
    best = doc.KeyNumber("lowest final loss", w.shorten(scheme), _write_best(comparison, scheme))
    sharpness = rate * comparison.norm(scheme, rate)
    measured = doc.KeyNumber("lr·‖H‖ at initialization", w.format_number(sharpness))
    return [best] if math.isnan(sharpness) else [best, measured]


def _table_blocks(comparison: Comparison) -> list[doc.Block]:
    columns = (
        _sweep_columns(comparison) if comparison.kind == "sweep" else _scheme_columns(comparison)
    )
    last = min(comparison.steps, window(comparison.steps))
    error = ", ± its standard error over seeds" if _has_errors(comparison) else ""
    diverged = "; ✗ diverged (seeds)" if any(run.diverged for run in comparison.runs) else ""
    if _any_idle(comparison):
        diverged += f"; ° does not learn: no lower than {_name_chance(comparison)}"
    norms = " ‖H‖: at initialization." if any(run.norms for run in comparison.runs) else ""
    legend = f"Final loss: the mean training loss of the last {last} steps{error}; * lowest{diverged}.{norms}"
    schemes = w.count(len(comparison.schemes), "std" if comparison.kind == "sweep" else "scheme")
    rates = w.count(len(comparison.learning_rates), "rate")
    seeds = w.count(len(comparison.seeds), "seed")
    named = comparison.optimizer.removeprefix("__main__.")
    optimizer = "your optimizer" if "<" in named else named  # a lambda or a local function
    warmup = f", +warmup over {comparison.warmup} steps" if comparison.warmup else ""
    runs = (
        f"{schemes} × {rates} × {seeds} = {w.count(len(comparison.runs), 'run')} of "
        f"{w.count(comparison.steps, 'step')}{w.tell_time(comparison.seconds)}: {optimizer}{warmup}, batches "
        f"of {comparison.batch_size} from {w.count(comparison.examples, 'example')}."
    )
    texts = [doc.Paragraph(text, "small") for text in (legend, runs)]
    return [
        doc.Table("Final losses", columns),
        *texts,
        *w.note_paragraphs(collect_notes(comparison)),
    ]


def collect_notes(comparison: Comparison) -> list[str]:
    """Return the notes of the comparison, and for each scheme the first one of its runs."""
    notes = [f"{w.unstopped(note)}." for note in comparison.notes]
    for scheme in comparison.schemes:
        runs = [run for run in comparison.runs if run.scheme == scheme]
        if found := [run.note for run in runs if run.note]:
            many = f"in {len(found)} of {w.count(len(runs), 'run')}"
            where = many if comparison.applies(scheme) else "does not apply"
            example = ", for example" if len(set(found)) > 1 else ""
            notes.append(f"{scheme} {where}{example}: {w.unstopped(found[0])}.")
    return notes


def _scheme_columns(comparison: Comparison) -> list[doc.Column]:
    schemes = rank_schemes(comparison)
    rates = comparison.learning_rates
    best_rates = [comparison.best_rate(scheme) for scheme in schemes]
    best = 0 if math.isnan(best_rates[0]) else rates.index(best_rates[0])
    columns = [w.name_column("scheme", schemes)]
    for at, rate in enumerate(rates):
        # A narrow terminal leaves out the rates farthest from the best one, and never that one.
        importance = 8 if at == best else max(1, 7 - abs(at - best))
        column = loss_column(comparison, schemes, rate, f"lr {w.format_number(rate)}")
        columns.append(replace(column, importance=importance))
    # A scheme that chooses its weights by the learning rate has a range.
    chosen = {s: rates if s in comparison.rate_dependent else [None] for s in schemes}
    norms = [
        w.format_range([comparison.norm(s, rate) for rate in chosen[s]], " … ") for s in schemes
    ]
    if any(norms):
        columns.append(
            doc.Column("‖H‖", norms, 4, keys=[comparison.norm(scheme) for scheme in schemes])
        )
    shown = ["–" if math.isnan(rate) else w.format_number(rate) for rate in best_rates]
    return (
        [*columns, doc.Column("best lr", shown, 8, keys=best_rates)] if len(rates) > 1 else columns
    )


def _sweep_columns(comparison: Comparison) -> list[doc.Column]:
    (rate,) = comparison.learning_rates
    columns = [doc.Column("std", [f"{std:g}" for std in comparison.stds], 9, keys=comparison.stds)]
    schemes = comparison.schemes
    layers = (*comparison.layers, NETWORK)
    norms = {
        layer: [comparison.norm(scheme, rate, layer) for scheme in schemes] for layer in layers
    }
    norms["lr·‖H‖"] = [rate * norm for norm in norms[NETWORK]]
    for heading, values in norms.items():
        importance = {NETWORK: 6, "lr·‖H‖": 7}.get(heading, 4)
        texts = [w.format_range([x]) for x in values]
        columns += [doc.Column(heading, texts, importance, keys=values)] if any(texts) else []
    heading = f"loss after {comparison.steps:,} steps"
    return [*columns, loss_column(comparison, comparison.schemes, rate, heading)]


def loss_column(
    comparison: Comparison, schemes: Sequence[str], rate: float, heading: str
) -> doc.Column:
    best = best_scheme(comparison, rate)
    errors = _has_errors(comparison)
    cells = [
        _write_loss(comparison, scheme, rate, errors) + "*" * (scheme == best) for scheme in schemes
    ]
    keys = [_trained_loss(comparison, scheme, rate) for scheme in schemes]
    marks = [
        "diverged" if comparison.diverged(s, rate) else "best" if s == best else "" for s in schemes
    ]
    return doc.Column(heading, cells, 8, keys=keys, marks=marks)


def _has_errors(comparison: Comparison) -> bool:
    return len(comparison.seeds) > 1 and len(comparison.learning_rates) <= RATES_WITH_ERRORS


def _write_loss(comparison: Comparison, scheme: str, rate: float, errors: bool) -> str:
    runs = [run for run in comparison.runs_of(scheme, rate) if run.applies]
    diverged = sum(run.diverged for run in runs)
    if not runs or diverged:
        return "–" if not runs else "✗" if len(runs) == 1 else f"✗ {diverged}/{len(runs)}"
    error = comparison.error(scheme, rate) if errors else math.nan
    idle = "" if comparison.learns(scheme, rate) else "°"
    return w.format_mean(comparison.loss(scheme, rate), error) + idle


def _trained_loss(comparison: Comparison, scheme: str, rate: float) -> float:
    return comparison.loss(scheme, rate) if comparison.trains(scheme, rate) else math.nan


def _heat_map(comparison: Comparison) -> doc.HeatMap:
    schemes = rank_schemes(comparison)
    rates = comparison.learning_rates
    best = {rate: best_scheme(comparison, rate) for rate in rates}
    losses = [[_trained_loss(comparison, scheme, rate) for rate in rates] for scheme in schemes]
    shown = [loss for row in losses for loss in row if not math.isnan(loss)]
    signs = ["✗: diverged"] * any(run.diverged for run in comparison.runs)
    signs += ["°: does not learn"] * _any_idle(comparison)
    lowest = [
        f"lr {w.format_number(rate)}: {scheme or 'none trains'}" for rate, scheme in best.items()
    ]
    return doc.HeatMap(
        "heat map",
        f"Final loss ({', '.join(signs)})" if signs else "Final loss",
        f"Final loss for each scheme and learning rate. Lowest, with a frame, at {'; '.join(lowest)}.",
        schemes,
        [w.format_number(rate) for rate in rates],
        losses,
        [
            [_write_loss(comparison, scheme, rate, errors=False) for rate in rates]
            for scheme in schemes
        ],
        *("learning rate", "scheme", "final loss"),
        log_color=bool(shown) and min(shown) > 0,
        details=[
            [_describe_cell(comparison, scheme, rate) for rate in rates] for scheme in schemes
        ],
        marked=[[best[rate] == scheme for rate in rates] for scheme in schemes],
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
    """Return the final loss of each std with its standard error, over lr·‖H‖, or over the std without it."""
    (rate,) = comparison.learning_rates
    places = [rate * comparison.norm(scheme, rate) for scheme in comparison.schemes]
    label = "lr·‖H‖ at initialization"
    rules = [doc.ReferenceLine(SGD_LIMIT, "lr·‖H‖ = 2", upright=True)]
    if any(map(math.isnan, places)):
        label = "std of the weights"
        rules = []
        places = list(comparison.stds)
    losses = [_trained_loss(comparison, scheme, rate) for scheme in comparison.schemes]
    series = []
    for scheme, place, loss in zip(comparison.schemes, places, losses, strict=True):
        point: dict[str, Any] = {"y": [loss], "color": "blue"}
        if math.isnan(loss):
            point = {"y": [math.inf], "color": "vermilion", "symbol": "cross"}
        elif not math.isnan(error := comparison.error(scheme, rate)):
            point |= {"low": [loss - error], "high": [loss + error]}
        point |= {"details": [_describe_cell(comparison, scheme, rate)], "in_legend": False}
        series.append(doc.Series(scheme, x=[place], points=True, **point))
    ends = [f"{s} {_write_loss(comparison, s, rate, errors=False)}" for s in comparison.schemes]
    trained = [loss for loss in losses if not math.isnan(loss)]
    return doc.LineChart(
        "final losses",
        f"Final loss over {label}",
        f"Final losses: {', '.join(ends)}.",
        series,
        "final loss",
        label,
        rules=rules if comparison.optimizer == "sgd" else [],
        log_x=min(places) > 0,
        log_y=w.spans_much(trained),
    )


def _loss_curves(comparison: Comparison) -> list[doc.Block]:
    """Return the loss of each scheme at its best rate (the lowest where it trains at none) over the steps."""
    is_sweep = comparison.kind == "sweep"
    looks = w.looks(comparison.schemes)
    series = []
    ends = []
    if is_sweep:
        colors = zip(comparison.schemes, w.ramp(comparison.stds), strict=True)
        looks = {scheme: {"color": color} for scheme, color in colors}
    for scheme in comparison.schemes if is_sweep else rank_schemes(comparison):
        best = comparison.best_rate(scheme)
        rate = min(comparison.learning_rates) if math.isnan(best) else best
        if runs := [run for run in comparison.runs_of(scheme, rate) if run.applies]:
            name = (
                scheme
                if len(comparison.learning_rates) == 1
                else f"{scheme}, lr {w.format_number(rate)}"
            )
            series += loss_series(runs, comparison.steps, name, looks[scheme])
            ends.append(f"{name} {_write_loss(comparison, scheme, rate, errors=False)}")
    untrained = min(
        (x for run in comparison.runs if math.isfinite(x := run.first_loss)), default=math.inf
    )
    caption = "Loss of each scheme at its best learning rate"
    told = f"Training loss over the steps. Final losses: {', '.join(ends)}."
    legend = "Lines are medians over seeds, bands their ranges; crosses mark divergence."
    charts = loss_charts("losses", caption, told, series, untrained, HEADROOM[comparison.kind])
    return [doc.Paragraph(legend, page_only=True), *charts] if charts else []


def loss_charts(
    name: str,
    caption: str,
    told: str,
    series: Sequence[doc.Series],
    untrained: float,
    headroom: float,
) -> list[doc.LineChart]:
    """Return a chart of losses up to `headroom` times the untrained one; none where nothing is below it.

    hessinit's own curves are drawn whole, however high they begin.
    """
    own = [one for one in series if one.name.startswith(OURS)]
    heights = [
        y for one in own for y in (*one.y, *(one.high or ())) if y is not None and math.isfinite(y)
    ]
    top = max(untrained + (headroom - 1) * abs(untrained), *heights, -math.inf)
    shown = [y for one in series if not one.points for y in one.y if y is not None and y <= top]
    if not shown:
        return []
    shown += heights
    low = min(shown)
    high = max(shown)
    log_y = w.spans_much(shown)
    room = 0.05 * (high - low or abs(high) or 1.0)
    low, high = (
        (max(low, LEAST) / 1.15, max(high, LEAST) * 1.15) if log_y else (low - room, high + room)
    )
    # A cross stays at the edge where its line leaves the axis.
    drawn = [
        replace(one, y=[math.inf]) if one.points and (one.y[0] or 0) > high else one
        for one in series
    ]
    return [
        doc.LineChart(
            name, caption, told, drawn, "training loss", "step", log_y=log_y, y_range=(low, high)
        )
    ]


def loss_series(
    runs: Sequence[Run], steps: int, name: str, style: dict[str, Any]
) -> list[doc.Series]:
    """Return the median loss with the range over the seeds that finish, and a cross where others diverge."""
    chunk = math.ceil(steps / MOST_POINTS)  # of steps: a point is at its middle
    middles = [(at * chunk + min(steps, (at + 1) * chunk)) / 2 for at in range(MOST_POINTS)]
    finite = [list(takewhile(math.isfinite, run.losses[:MOST_POINTS])) for run in runs]
    whole = [losses for run, losses in zip(runs, finite, strict=True) if run.finite]
    columns = list(zip(*(whole or finite), strict=False))
    line = doc.Series(name, list(map(statistics.median, columns)), middles[: len(columns)], **style)
    if len(runs) > 1:
        line = replace(line, low=list(map(min, columns)), high=list(map(max, columns)))
    if not (diverged := [losses for run, losses in zip(runs, finite, strict=True) if run.diverged]):
        return [line]
    last = max(diverged, key=len)
    step, loss = (middles[len(last) - 1], last[-1]) if last else (0.0, math.inf)
    details = [f"{len(diverged)} of {w.count(len(runs), 'seed')} diverged"]
    return [line, w.crosses(name, [loss], [step], details, **style)]
