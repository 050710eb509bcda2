"""The document of a comparison of initialization schemes, or of a sweep of standard deviations."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.results.comparison import MOST_POINTS, NETWORK, Comparison, Run, window

MOST_NOTES = 6
RATES_WITH_ERRORS = 3  # a terminal has room for standard errors beside so many losses
WARMUP = "+warmup"
SGD_LIMIT = 2.0  # lr·‖H‖ above which gradient descent diverges on a quadratic; other optimizers differ
# Loss axes end at so many times the untrained loss, or a diverging curve would flatten all others. In a sweep
# large weights begin far above it, and their descent is what the chart is about.
HEADROOM = {"compare": 3.0, "sweep": 30.0}
LEAST = 1e-12  # a loss of exactly 0 is drawn here on a logarithmic axis


@dataclass(frozen=True)
class MeanLoss:
    """Mean over seeds and its standard error (nan for one seed)."""

    mean: float
    error: float

    def ties_with(self, other: MeanLoss) -> bool:
        """Return whether the means differ by at most two standard errors of their difference."""
        if not (math.isfinite(self.mean) and math.isfinite(other.mean)):
            return False
        # nan compares as False: without standard errors only equal means tie.
        difference = abs(self.mean - other.mean)
        return difference == 0 or difference <= 2 * math.hypot(self.error, other.error)

    def __str__(self) -> str:
        return w.format_mean(self.mean, self.error)


def describe_comparison(comparison: Comparison) -> doc.Document:
    """Return the verdict, the charts, the table of all results and the settings."""
    is_sweep = comparison.kind == "sweep"
    settings = {name: value for name, value in comparison.settings.items() if value is not None}
    facts = [doc.Facts("Settings", w.write_pairs(settings))] if settings else []
    everything = doc.Section("All results", [*_table_blocks(comparison), *facts])
    return doc.Document(
        title="Sweep of standard deviations" if is_sweep else "Comparison of initialization schemes",
        verdict=conclude_comparison(comparison),
        numbers=_key_numbers(comparison),
        sections=[*_chart_sections(comparison), everything],
        footer=w.write_versions(f"Seeds {', '.join(map(str, comparison.seeds))}", comparison.versions),
        picture=("final losses" if is_sweep else "heat map", "losses"),
        absent={"heat map": "a sweep has one learning rate, so there is no heat map."} if is_sweep else {},
    )


def at_best_rate(comparison: Comparison, scheme: str) -> MeanLoss:
    """Return the scheme's loss at its own best learning rate; inf if it trains at none."""
    rate = comparison.best_rate(scheme)
    if math.isnan(rate):
        return MeanLoss(math.inf, math.nan)
    return MeanLoss(comparison.loss(scheme, rate), comparison.error(scheme, rate))


def rank_schemes(comparison: Comparison) -> tuple[str, ...]:
    """Return the schemes by their loss at their own best rate; last those that do not apply to the model."""
    places = {s: (not comparison.applies(s), at_best_rate(comparison, s).mean) for s in comparison.schemes}
    return tuple(sorted(comparison.schemes, key=places.__getitem__))


def best_scheme(comparison: Comparison, rate: float) -> str | None:
    """Return the scheme with the lowest loss at that rate among those that train there."""
    trained = [scheme for scheme in comparison.schemes if comparison.trains(scheme, rate)]
    return min(trained, key=lambda scheme: comparison.loss(scheme, rate), default=None)


def untrained_loss(comparison: Comparison) -> float:
    """Return the lowest mean initial loss of any scheme: about the loss of a constant prediction."""
    initial: dict[str, list[float]] = {}
    for run in comparison.runs:
        if math.isfinite(run.first_loss):
            initial.setdefault(run.scheme, []).append(run.first_loss)
    return min(map(statistics.fmean, initial.values()), default=math.nan)


def regrets(comparison: Comparison) -> dict[str, MeanLoss]:
    """Return the mean over the rates of log(loss / lowest loss at that rate), for each scheme.

    Logarithms, because one rate at which the lowest loss is nearly 0 would outweigh all others. A run that
    diverges counts as untrained, or as the highest loss of a scheme that trains at that rate if that is
    higher: diverging never beats training. Rates at which no scheme trains, and schemes that do not apply,
    are left out. Empty if a loss is not positive.
    """
    trained = {
        rate: [comparison.loss(s, rate) for s in comparison.schemes if comparison.trains(s, rate)]
        for rate in comparison.learning_rates
    }
    lowest = {rate: min(losses) for rate, losses in trained.items() if losses}
    worst = {rate: max(untrained_loss(comparison), *trained[rate]) for rate in lowest}
    logs: dict[str, dict[int, list[float]]] = {}
    for run in comparison.runs:
        rate = run.learning_rate
        if run.applies and rate in lowest:
            loss = worst[rate] if run.diverged else run.final_loss
            if loss <= 0 or lowest[rate] <= 0:
                return {}
            by_seed = logs.setdefault(run.scheme, {})
            by_seed.setdefault(run.seed, []).append(math.log(loss / lowest[rate]))
    found = {}
    for scheme, by_seed in logs.items():
        means = [statistics.fmean(values) for values in by_seed.values() if len(values) == len(lowest)]
        if means:
            error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
            found[scheme] = MeanLoss(statistics.fmean(means), error)
    return found


def conclude_comparison(comparison: Comparison) -> list[str]:
    """Return which scheme has the lowest loss, which depends least on the rate, and which do not train."""
    results = {scheme: at_best_rate(comparison, scheme) for scheme in rank_schemes(comparison)}
    trained = {scheme: result for scheme, result in results.items() if math.isfinite(result.mean)}
    if not trained:
        return [_nothing_trains(comparison)]
    if comparison.kind == "sweep":
        return _conclude_sweep(comparison, trained)
    said = [_name_winner(comparison, trained), *_least_sensitive(comparison)]
    never = [scheme for scheme in comparison.schemes if scheme not in trained and comparison.applies(scheme)]
    for seeds, is_whole in (("", True), (" with at least one seed", False)):
        if some := [scheme for scheme in never if _all_diverged(comparison, scheme) == is_whole]:
            said.append(f"{w.join_names(some)} {_diverge(some)} at every learning rate{seeds}.")
    return said


def _diverge(some: Sequence[str]) -> str:
    return w.agree(some, "diverges", "diverge")


def _name_winner(comparison: Comparison, trained: Mapping[str, MeanLoss]) -> str:
    best, *others = trained
    single = len(comparison.learning_rates) == 1
    rates = {scheme: f"lr {w.format_number(comparison.best_rate(scheme))}" for scheme in trained}
    where = {scheme: f"{loss}{'' if single else f' at {rates[scheme]}'}" for scheme, loss in trained.items()}
    if not others:
        only = "Only " if len(comparison.schemes) > 1 else ""
        return f"{only}{w.shorten(best)} trains: final loss {trained[best]} at {rates[best]}."
    doubt = " (one seed: no error bars)" if len(comparison.seeds) == 1 else ""
    tied = [scheme for scheme in others if trained[scheme].ties_with(trained[best])]
    if tied:
        second = f" and {where[tied[0]]}" if len(tied) == 1 else ""
        how = f"equal losses{doubt}" if doubt else "within two standard errors"
        at = rates[best] if single else "their best learning rates"
        return f"{w.join_names([best, *tied])} tie at {at}: {where[best]}{second}, {how}."
    at, second = f" at {rates[best]}" if single else "", f"next {w.shorten(others[0])}, {where[others[0]]}"
    return f"{w.shorten(best)} has the lowest final loss{at}{doubt}: {where[best]}; {second}."


def _least_sensitive(comparison: Comparison) -> list[str]:
    """Name the scheme of the smallest regret, and a stable one if it diverges where another trains."""
    found = regrets(comparison)
    rates = [rate for rate in comparison.learning_rates if best_scheme(comparison, rate) is not None]
    if len(rates) < 2 or len(found) < 2:
        return []
    # What is best everywhere is at 1.00, though a mean of logarithms is below the logarithm of the mean.
    times = {scheme: f"{w.format_ratio(math.exp(max(0.0, one.mean)))}×" for scheme, one in found.items()}
    diverging = {scheme: [rate for rate in rates if comparison.diverged(scheme, rate)] for scheme in found}
    best, second, *_ = ranked = sorted(found, key=lambda scheme: found[scheme].mean)
    stable = [scheme for scheme in ranked if not diverging[scheme]]
    average = f"{times[best]} the lowest at each rate, on average over {len(rates)} rates"
    if diverging[best] and stable:
        where = w.join_names([w.format_number(rate) for rate in diverging[best]])
        trains = f"{w.shorten(stable[0])} trains at every rate at which another does: {times[stable[0]]}"
        return [f"The loss of {w.shorten(best)} is {average}, but it diverges at lr {where}; {trains}."]
    tie = ""
    if found[second].ties_with(found[best]):
        tie = ", equal" if math.isnan(found[best].error) else ", within two standard errors"
    counted = " (diverged runs count as untrained)" if diverging[best] or diverging[second] else ""
    following = f"next {w.shorten(second)}, {times[second]}{tie}{counted}"
    return [f"{w.shorten(best)} is least sensitive to the learning rate: its loss is {average}; {following}."]


def _conclude_sweep(comparison: Comparison, trained: Mapping[str, MeanLoss]) -> list[str]:
    (rate,) = comparison.learning_rates
    stds = {scheme: f"{std:g}" for scheme, std in zip(comparison.schemes, comparison.stds, strict=True)}
    best, *others = trained
    sharpness = rate * comparison.norm(best, rate)
    where = (
        "" if math.isnan(sharpness) else f", where lr·‖H‖ = {w.format_number(sharpness)} at initialization"
    )
    said = [f"The final loss is lowest at std {stds[best]}: {trained[best]}{where}."]
    if tied := [stds[scheme] for scheme in others if trained[scheme].ties_with(trained[best])]:
        how = "equal losses" if math.isnan(trained[best].error) else "within two standard errors"
        said.append(f"std {w.join_names(tied)} {w.agree(tied, 'ties', 'tie')} with it, {how}.")
    broken = [scheme for scheme in comparison.schemes if comparison.diverged(scheme, rate)]
    partly = [scheme for scheme in broken if not _all_diverged(comparison, scheme)]
    if whole := [stds[scheme] for scheme in broken if scheme not in partly]:
        said.append(f"std {w.join_names(whole)} {_diverge(whole)}.")
    return said + [f"std {stds[s]} diverges with {_diverged_seeds(comparison, s, rate)}." for s in partly]


def _nothing_trains(comparison: Comparison) -> str:
    """Say why, as far as the runs tell: a lower rate does not help against everything."""
    kind = "std" if comparison.kind == "sweep" else "scheme"
    runs = [run for run in comparison.runs if run.applies]
    if not runs:
        return f"No {kind} applies to this model; the notes say why."
    if not any(math.isfinite(run.first_loss) for run in runs):
        return f"No {kind} trains: the initial loss is not finite. Check the data, the loss and the weights."
    seeds = "" if all(run.diverged for run in runs) else " with every seed"
    rates = w.join_names([w.format_number(rate) for rate in comparison.learning_rates])
    return f"No {kind} trains{seeds} at lr {rates}; try a lower rate."


def _all_diverged(comparison: Comparison, scheme: str) -> bool:
    return all(run.diverged for run in comparison.runs if run.scheme == scheme and run.applies)


def _diverged_seeds(comparison: Comparison, scheme: str, rate: float) -> str:
    return f"{comparison.diverged(scheme, rate)} of {w.count(len(comparison.seeds), 'seed')}"


def _key_numbers(comparison: Comparison) -> list[doc.KeyNumber]:
    if all(math.isnan(comparison.best_rate(scheme)) for scheme in comparison.schemes):
        return []
    scheme, rate = comparison.best
    chosen = doc.KeyNumber("lowest loss", w.shorten(scheme), f"at lr {w.format_number(rate)}")
    if comparison.kind == "sweep":
        chosen = doc.KeyNumber("lowest loss at std", f"{comparison.stds[comparison.schemes.index(scheme)]:g}")
    found = [chosen, doc.KeyNumber("final loss", str(at_best_rate(comparison, scheme)))]
    sharpness = rate * comparison.norm(scheme, rate)
    measured = doc.KeyNumber("lr·‖H‖ at initialization", w.format_number(sharpness))
    return found if math.isnan(sharpness) else [*found, measured]


def _table_blocks(comparison: Comparison) -> list[doc.Block]:
    is_sweep = comparison.kind == "sweep"
    is_measured = any(run.norms for run in comparison.runs)
    several = len(comparison.seeds) > 1
    last = min(comparison.steps, window(comparison.steps))
    mean = f"Final loss: the mean training loss of the last {last} steps"
    whose = "the layers and the network" if is_sweep else "the network"
    rest = "; * lowest" if is_sweep else "; * lowest at that rate"
    rest += "; ✗ diverged (seeds)." if any(run.diverged for run in comparison.runs) else "."
    rest += f" ‖H‖: of {whose} at initialization." if is_measured else ""
    caption = "Final losses and ‖H‖ at initialization" if is_measured else "Final losses"
    table = doc.Table(caption, _columns(comparison))
    error = ", ± its standard error over seeds" if several else ""
    text = doc.Paragraph(f"{mean}{error}{rest}", "small")
    blocks: list[doc.Block] = [table, text]
    if several and len(comparison.learning_rates) > RATES_WITH_ERRORS:
        short = f"{mean}; to_html() also shows standard errors{rest}"
        blocks = [
            replace(table, columns=_columns(comparison, errors=False), text_only=True),
            replace(text, text=short, text_only=True),
            replace(table, page_only=True),
            replace(text, page_only=True),
        ]
    runs = doc.Paragraph(_describe_runs(comparison), "small")
    return [*blocks, runs, *w.note_paragraphs(collect_notes(comparison))]


def _describe_runs(comparison: Comparison) -> str:
    schemes = w.count(len(comparison.schemes), "std" if comparison.kind == "sweep" else "scheme")
    rates, seeds = w.count(len(comparison.learning_rates), "rate"), w.count(len(comparison.seeds), "seed")
    named = comparison.optimizer.removeprefix("__main__.")
    optimizer = "your optimizer" if "<" in named else named  # a lambda or a local function
    warmup = f", {WARMUP} over {comparison.warmup} steps" if comparison.warmup else ""
    return (
        f"{schemes} × {rates} × {seeds} = {w.count(len(comparison.runs), 'run')} of "
        f"{w.count(comparison.steps, 'step')}{w.tell_time(comparison.seconds)}: {optimizer}{warmup}, batches "
        f"of {comparison.batch_size} from {w.count(comparison.examples, 'example')}."
    )


def collect_notes(comparison: Comparison) -> list[str]:
    """Return the notes of the comparison and of its runs; those that differ only in numbers appear once."""
    alike: dict[tuple[str, str], list[str]] = {}
    for run in comparison.runs:
        if run.note:
            alike.setdefault((run.scheme, re.sub(r"\d[\d.,e+-]*", "#", run.note)), []).append(run.note)
    notes = [f"{w.unstopped(note)}." for note in comparison.notes]
    for (scheme, _), found in alike.items():
        runs = sum(run.scheme == scheme for run in comparison.runs)
        where = (
            f"in {len(found)} of {w.count(runs, 'run')}" if comparison.applies(scheme) else "does not apply"
        )
        example = "" if len(set(found)) == 1 else ", for example"
        notes.append(f"{scheme} {where}{example}: {w.unstopped(found[0])}.")
    if len(notes) > MOST_NOTES:
        notes = [*notes[: MOST_NOTES - 1], f"{len(notes) - MOST_NOTES + 1} more notes are in the runs."]
    return notes


def _columns(comparison: Comparison, *, errors: bool = True) -> list[doc.Column]:
    if comparison.kind == "sweep":
        return _sweep_columns(comparison)
    schemes, rates = rank_schemes(comparison), comparison.learning_rates
    best_rates = [comparison.best_rate(scheme) for scheme in schemes]
    best = 0 if math.isnan(best_rates[0]) else rates.index(best_rates[0])
    columns = [w.name_column("scheme", schemes)]
    for at, rate in enumerate(rates):
        # A narrow terminal leaves out the rates farthest from the best one, and never that one.
        importance = 8 if at == best else max(1, 7 - abs(at - best))
        column = _loss_column(comparison, schemes, rate, f"lr {w.format_number(rate)}", errors)
        columns.append(replace(column, importance=importance))
    # A scheme that chooses its weights by the learning rate has a range.
    chosen = {s: rates if s in comparison.rate_dependent else [None] for s in schemes}
    norms = [w.format_range([comparison.norm(s, rate) for rate in chosen[s]], " … ") for s in schemes]
    if any(norms):
        columns.append(doc.Column("‖H‖", norms, 4, keys=[comparison.norm(scheme) for scheme in schemes]))
    shown = ["–" if math.isnan(rate) else w.format_number(rate) for rate in best_rates]
    return [*columns, doc.Column("best lr", shown, 8, keys=best_rates)] if len(rates) > 1 else columns


def _sweep_columns(comparison: Comparison) -> list[doc.Column]:
    (rate,) = comparison.learning_rates
    columns = [doc.Column("std", [f"{std:g}" for std in comparison.stds], 9, keys=comparison.stds)]
    norms = {
        layer: [comparison.norm(scheme, rate, layer) for scheme in comparison.schemes]
        for layer in (*comparison.layers, NETWORK)
    }
    norms["lr·‖H‖"] = [rate * norm for norm in norms[NETWORK]]
    for heading, values in norms.items():
        importance, texts = (
            {NETWORK: 6, "lr·‖H‖": 7}.get(heading, 4),
            [w.format_range([one]) for one in values],
        )
        columns += [doc.Column(heading, texts, importance, keys=values)] if any(texts) else []
    return [
        *columns,
        _loss_column(comparison, comparison.schemes, rate, f"loss after {comparison.steps:,} steps"),
    ]


def _loss_column(
    comparison: Comparison, schemes: Sequence[str], rate: float, heading: str, errors: bool = True
) -> doc.Column:
    best = best_scheme(comparison, rate)
    cells = [_write_loss(comparison, scheme, rate, errors) + "*" * (scheme == best) for scheme in schemes]
    keys = [_trained_loss(comparison, scheme, rate) for scheme in schemes]
    marks = ["diverged" if comparison.diverged(s, rate) else "best" if s == best else "" for s in schemes]
    return doc.Column(heading, cells, 8, keys=keys, marks=marks)


def _write_loss(comparison: Comparison, scheme: str, rate: float, errors: bool) -> str:
    runs = [run for run in comparison.runs_of(scheme, rate) if run.applies]
    diverged = sum(run.diverged for run in runs)
    if not runs or diverged:
        return "–" if not runs else "✗" if len(runs) == 1 else f"✗ {diverged}/{len(runs)}"
    error = comparison.error(scheme, rate) if errors else math.nan
    return w.format_mean(comparison.loss(scheme, rate), error)


def _trained_loss(comparison: Comparison, scheme: str, rate: float) -> float:
    return comparison.loss(scheme, rate) if comparison.trains(scheme, rate) else math.nan


def _write_end(comparison: Comparison, scheme: str, rate: float) -> str:
    loss = _trained_loss(comparison, scheme, rate)
    return f"{scheme} {'diverged' if math.isnan(loss) else w.format_number(loss)}"


def _chart_sections(comparison: Comparison) -> list[doc.Section]:
    norms, is_sweep = _norm_charts(comparison), comparison.kind == "sweep"
    sections = [doc.Section("Scheme and learning rate", [] if is_sweep else [_heat_map(comparison)])]
    if is_sweep:
        sections = [doc.Section("Curvature and loss", [_final_losses(comparison), *norms])]
    if curves := _curve_blocks(comparison):
        legend = "Lines are medians over seeds, bands their ranges; crosses mark divergence."
        sections.append(doc.Section("Loss curves", [doc.Paragraph(legend, page_only=True), *curves]))
    return (
        sections if is_sweep or not norms else [*sections, doc.Section("Curvature at initialization", norms)]
    )


def _heat_map(comparison: Comparison) -> doc.HeatMap:
    schemes, rates = rank_schemes(comparison), comparison.learning_rates
    best = {rate: best_scheme(comparison, rate) for rate in rates}
    losses = [[_trained_loss(comparison, scheme, rate) for rate in rates] for scheme in schemes]
    shown = [loss for row in losses for loss in row if not math.isnan(loss)]
    lowest = [f"lr {w.format_number(rate)}: {scheme or 'none trains'}" for rate, scheme in best.items()]
    crossed = "; ✗: diverged" if any(run.diverged for run in comparison.runs) else ""
    return doc.HeatMap(
        "heat map",
        f"Final loss; framed: lowest at that rate{crossed}",
        f"Final loss for each scheme and learning rate. Lowest at {'; '.join(lowest)}.",
        schemes,
        [w.format_number(rate) for rate in rates],
        losses,
        [[_write_loss(comparison, scheme, rate, errors=False) for rate in rates] for scheme in schemes],
        *("learning rate", "scheme", "final loss"),
        log_color=bool(shown) and min(shown) > 0,
        details=[[_describe_cell(comparison, scheme, rate) for rate in rates] for scheme in schemes],
        marked=[[best[rate] == scheme for rate in rates] for scheme in schemes],
    )


def _describe_cell(comparison: Comparison, scheme: str, rate: float) -> str:
    if not comparison.applies(scheme):
        return "does not apply to this model"
    parts = []
    error, norm = comparison.error(scheme, rate), comparison.norm(scheme, rate)
    if comparison.diverged(scheme, rate):
        parts.append(f"{_diverged_seeds(comparison, scheme, rate)} diverged")
    elif not math.isnan(error):
        parts.append(f"± {w.format_number(error, 2)} over {len(comparison.seeds)} seeds")
    if not math.isnan(norm):
        parts.append(f"lr·‖H‖ = {w.format_number(rate * norm)} at initialization")
    return "; ".join(parts)


def _norm_charts(comparison: Comparison) -> list[doc.Block]:
    """Return ‖H‖ at initialization over the learning rate, with the stability limit, and over the layers."""
    rates, look, charts = comparison.learning_rates, _looks(comparison), []
    measured = [
        scheme
        for scheme in _order(comparison)
        if not math.isnan(comparison.norm(scheme))
        # Warmup changes no weights: the same scheme without it is enough.
        and not (scheme.endswith(WARMUP) and scheme.removesuffix(WARMUP) in comparison.schemes)
    ]
    if measured and len(rates) > 1:
        series, ranges = [], []
        for scheme in measured:
            norms = [comparison.norm(scheme, rate) for rate in rates]
            products = [rate * norm for rate, norm in zip(rates, norms, strict=True)]
            details = [f"lr·‖H‖ = {w.format_number(product)}" for product in products]
            known = [None if math.isnan(norm) else norm for norm in norms]
            series.append(doc.Series(scheme, known, rates, details=details, **look[scheme]))
            ranges.append(f"{scheme} {w.format_range(norms)}")
        if comparison.optimizer == "sgd":
            limits = [SGD_LIMIT / rate for rate in rates]
            series.append(doc.Series("stability limit 2/lr", limits, rates, "grey", dashed=True))
        caption = "‖H‖ of the network at initialization, over the learning rate"
        told, labels = f"‖H‖ at initialization: {'; '.join(ranges)}.", ("‖H‖ of the network", "learning rate")
        charts.append(doc.LineChart("norms", caption, told, series, *labels, log_x=True, log_y=True))
    if measured and comparison.layers:
        by_layer = {s: [comparison.norm(s, layer=layer) for layer in comparison.layers] for s in measured}
        series = [doc.Series(scheme, values, **look[scheme]) for scheme, values in by_layer.items()]
        ranges = [f"{scheme} {w.format_range(values)}" for scheme, values in by_layer.items()]
        caption = "‖H‖ of every layer at initialization"
        told = f"From the flattest to the sharpest layer: {'; '.join(ranges)}."
        layers: dict[str, Any] = {"layers": comparison.layers, "log_y": True}
        charts.append(doc.LineChart("layers", caption, told, series, "‖H‖ at initialization", **layers))
    return [*charts]


def _order(comparison: Comparison) -> tuple[str, ...]:
    return comparison.schemes if comparison.kind == "sweep" else rank_schemes(comparison)


def _looks(comparison: Comparison) -> dict[str, Any]:
    if comparison.kind != "sweep":
        return {**w.looks(comparison.schemes)}
    colors = zip(comparison.schemes, w.ramp(comparison.stds), strict=True)
    return {scheme: {"color": color} for scheme, color in colors}


def _curve_blocks(comparison: Comparison) -> list[doc.Block]:
    """Return each scheme that trains at its own best rate, and all schemes at each of several rates."""
    order, (first, *others) = _order(comparison), comparison.learning_rates
    rates = {scheme: comparison.best_rate(scheme) if others else first for scheme in order}
    rates = {scheme: rate for scheme, rate in rates.items() if not math.isnan(rate)}
    caption = f"Loss at lr {w.format_number(first)}"
    if not others:
        return [*_on_one_axis(comparison, [_loss_chart(comparison, "losses", caption, rates)])]
    best = _loss_chart(comparison, "losses", "Each scheme at its own best learning rate", rates)
    named = [replace(one, name=f"{one.name}, lr {w.format_number(rates[one.name])}") for one in best.series]
    charts = []
    for rate in comparison.learning_rates:
        caption = f"lr {w.format_number(rate)}"
        charts.append(_loss_chart(comparison, caption, caption, dict.fromkeys(order, rate)))
    # A heading, or the first chart would be as small as the others.
    heading = doc.Paragraph("All schemes at each learning rate", "heading", page_only=True)
    by_rate = _on_one_axis(comparison, charts)
    blocks: list[doc.Block] = [*_on_one_axis(comparison, [replace(best, series=named)])]
    return [*blocks, heading, *by_rate] if by_rate else blocks


def _loss_chart(comparison: Comparison, name: str, caption: str, rates: Mapping[str, float]) -> doc.LineChart:
    """Return the loss curve of each scheme at its rate."""
    series, ends, look = [], [], _looks(comparison)
    for scheme, rate in rates.items():
        if runs := [run for run in comparison.runs_of(scheme, rate) if run.applies]:
            series += loss_series(runs, comparison.steps, scheme, look[scheme])
            ends.append(_write_end(comparison, scheme, rate))
    told = f"Training loss over the steps. Final losses: {', '.join(ends) or 'none'}."
    return doc.LineChart(name, caption, told, series, "training loss", "step")


def loss_series(runs: Sequence[Run], steps: int, name: str, look: Mapping[str, Any]) -> list[doc.Series]:
    """Return the median loss with the range over seeds, and a cross where seeds diverge.

    Each point is at the middle of a chunk of steps. Only seeds that finish count, or all if none does.
    """
    chunk = math.ceil(steps / MOST_POINTS)
    middles = [(at * chunk + min(steps, (at + 1) * chunk)) / 2 for at in range(MOST_POINTS)]
    finite = [list(takewhile(math.isfinite, run.losses[:MOST_POINTS])) for run in runs]
    whole = [losses for run, losses in zip(runs, finite, strict=True) if run.finite]
    broken = [losses for run, losses in zip(runs, finite, strict=True) if not run.finite]
    columns = list(zip(*(whole or broken), strict=False))
    x, y = middles[: len(columns)], list(map(statistics.median, columns))
    line = doc.Series(name, y, x, **look)
    if len(runs) > 1:
        line = replace(line, low=list(map(min, columns)), high=list(map(max, columns)))
    diverged = sum(run.diverged for run in runs)
    if not diverged:
        return [line]
    step, loss = (x[-1], y[-1]) if y else (0.0, math.inf)
    if broken and whole:
        longest = max(broken, key=len)
        step, loss = (middles[len(longest) - 1], longest[-1]) if longest else (0.0, math.inf)
    details = [f"{diverged} of {w.count(len(runs), 'seed')} diverged"]
    marks: dict[str, Any] = {"points": True, "symbol": "cross", "in_legend": False, "details": details}
    return [line, doc.Series(name, [loss], [step], **marks, **look)]


def _on_one_axis(comparison: Comparison, charts: Sequence[doc.LineChart]) -> list[doc.LineChart]:
    """Return the charts with one loss axis, at whose top lines end that leave it; none without a loss."""
    untrained = untrained_loss(comparison)
    top = math.inf if math.isnan(untrained) else untrained + (HEADROOM[comparison.kind] - 1) * abs(untrained)
    lines = [series for chart in charts for series in chart.series if not series.points]
    shown = [loss for line in lines for loss in line.y if loss is not None and loss <= top]
    if not shown:
        return []
    low, high, log_y = min(shown), max(shown), w.spans_much(shown)
    room = 0.05 * (high - low or abs(high) or 1.0)
    low, high = (max(low, LEAST) / 1.15, max(high, LEAST) * 1.15) if log_y else (low - room, high + room)

    def cut(series: doc.Series) -> doc.Series:
        inside = [at for at, loss in enumerate(series.y) if loss is not None and loss <= high]
        last = None if series.points else inside[-1] + 2 if inside else 1
        least = low if series.points else -math.inf  # a band may reach below the axis
        parts: dict[str, Any] = {
            name: [min(max(loss, least), high) for loss in part[:last]]
            for name in ("y", "low", "high")
            if (part := getattr(series, name)) is not None
        }
        return replace(series, x=(series.x or [])[:last], **parts)

    found = []
    for chart in charts:
        series: list[doc.Series] = []
        for one in chart.series:
            series.append(cut(one))
            if one.points and series[-2].y and _end(one)[0] > _end(series[-2])[0]:
                step, loss = _end(series[-2])  # a cross follows its line, and stays at the end of it
                series[-1] = replace(series[-1], x=[step], y=[loss])
        found.append(replace(chart, series=series, log_y=log_y, y_range=(low, high)))
    return found


def _end(series: doc.Series) -> tuple[float, float]:
    return (series.x or [0.0])[-1] or 0.0, series.y[-1] or 0.0


def _final_losses(comparison: Comparison) -> doc.LineChart:
    """Return the final loss of each std with its standard error, over lr·‖H‖, or over the std without it."""
    (rate,) = comparison.learning_rates
    places = [rate * comparison.norm(scheme, rate) for scheme in comparison.schemes]
    label, rules = "lr·‖H‖ at initialization", [doc.ReferenceLine(SGD_LIMIT, "lr·‖H‖ = 2", upright=True)]
    if any(map(math.isnan, places)):
        label, rules, places = "std of the weights", [], list(comparison.stds)
    losses, series, look = [], [], _looks(comparison)
    for scheme, place in zip(comparison.schemes, places, strict=True):
        loss, error = _trained_loss(comparison, scheme, rate), comparison.error(scheme, rate)
        point: dict[str, Any] = {"y": [loss], "details": [w.format_mean(loss, error)]}
        if math.isnan(loss):
            diverged = f"{_diverged_seeds(comparison, scheme, rate)} diverged"
            point = {"y": [math.inf], "details": [diverged], "symbol": "cross"}
        elif not math.isnan(error):
            point |= {"low": [loss - error], "high": [loss + error]}
        series.append(doc.Series(scheme, x=[place], points=True, **point, **look[scheme]))
        losses += [] if math.isnan(loss) else [loss]
    ends = ", ".join(_write_end(comparison, scheme, rate) for scheme in comparison.schemes)
    texts = "final losses", f"Final loss over {label}", f"Final losses: {ends}."
    limits = rules if comparison.optimizer == "sgd" else []
    axes: dict[str, Any] = {"log_x": min(places) > 0, "log_y": w.spans_much(losses)}
    return doc.LineChart(*texts, series, "final loss", label, rules=limits, **axes)
