"""What the runs of word2vec say together: norms and losses, the claim as rank correlations, figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hessinit.paper.experiment import Setting
from hessinit.paper.printed import make_cell
from hessinit.paper.word2vec_design import BATCH, DESIGNS, MODEL_NAMES, OURS
from hessinit.paper.word2vec_sentences import describe_all, describe_bilinear, describe_sweep
from hessinit.paper.word2vec_sweep import LEVELS, NORMS, Sweep, correlate, read_sweep
from hessinit.results.reproduction import Cell, Curve, Figure, Findings, Table
from hessinit.results.result import Plain

LEVEL_COLUMNS = {"mean": "‖H‖", "sum": "summed ‖H‖", "step": "lr·‖H‖"}


def conclude(setting: Setting, results: Mapping[str, Plain]) -> Findings:
    design = DESIGNS[setting.data]
    tables: list[Table] = []
    figures: list[Figure] = []
    sentences: list[str] = []
    all_sweeps: list[Sweep] = []
    for model in MODEL_NAMES:
        sweeps = [read_sweep(setting, results, model, rate) for rate in design.rates]
        tables += [norms_table(setting.data, sweeps, dimension) for dimension in design.dimensions]
        tables += map(claim_table, sweeps)
        figures += [points_figure(sweeps), curves_figure(sweeps[0], design.dimensions[-1], design.steps)]
        sentences += [sentence for sweep in sweeps for sentence in describe_sweep(sweep)]
        sentences.append(describe_bilinear(sweeps[0]))
        all_sweeps += sweeps
    sentences = [*describe_all(all_sweeps), *sentences]
    return Findings(tables=tuple(tables), figures=tuple(figures), sentences=tuple(sentences))


def norms_table(data: str, sweeps: Sequence[Sweep], dimension: int) -> Table:
    """Norms and final losses by standard deviation; our own start has other norms at every rate."""
    cells: list[Cell] = []
    for sweep in sweeps:
        for place in sweep.places:
            if place.dimension != dimension:
                continue
            row = place.row if place.row != OURS else f"{OURS}, {sweep.rate:g}"
            if sweep is sweeps[0] or place.row == OURS:
                for name, label in NORMS.items():
                    cells.append(make_cell("word2vec", data, row, f"‖H‖ {label}", place.norms[name]))
            cells.append(make_cell("word2vec", data, row, f"loss at {sweep.rate:g}", place.final))
    return Table(
        title=f"Skip-gram, {MODEL_NAMES[sweeps[0].model]}, dimension {dimension}: norms at the start and "
        "training loss",
        corner="std",
        rows=tuple(dict.fromkeys(cell.row for cell in cells)),
        columns=tuple(dict.fromkeys(cell.column for cell in cells)),
        cells=tuple(cells),
        note="‖H‖ is the largest |eigenvalue| on the first batch, of the loss averaged over pairs. The loss "
        "is the mean of the last tenth of training, by rate for one pair.",
    )


def claim_table(sweep: Sweep) -> Table:
    """Spearman's ρ and its p for every norm and what may be near 1; the network's by dimension too."""
    cells: list[Cell] = []
    for name, label in NORMS.items():
        # Within a dimension the matrices' norms rank as the network's do, or nearly.
        for dimension in (None, *sweep.dimensions) if name == "network" else (None,):
            row = label if dimension is None else f"{label}, dimension {dimension}"
            for level in LEVELS:
                found = correlate(sweep, name, level, dimension)
                for letter, value in (("ρ", found.rho), ("p", found.p)):
                    column = f"{letter}, {LEVEL_COLUMNS[level]}"
                    cells.append(Cell(row=row, column=column, ours=value, n=found.n))
    return Table(
        title=f"Skip-gram, {MODEL_NAMES[sweep.model]}, rate {sweep.rate:g}: distance of a norm from 1 "
        "against training loss",
        corner="norm",
        rows=tuple(dict.fromkeys(cell.row for cell in cells)),
        columns=tuple(dict.fromkeys(cell.column for cell in cells)),
        cells=tuple(cells),
        note="Spearman's ρ between |ln x| and the final loss, x as the column says; positive supports the "
        f"claim. Summed: over the {BATCH} pairs of a batch. p by permutation of the standard deviations, "
        "both ways, not corrected for testing often. The points are means over seeds.",
    )


def points_figure(sweeps: Sequence[Sweep]) -> Figure:
    """The network's norm at the start against the final loss."""
    curves = []
    for sweep in sweeps:
        for dimension in sweep.dimensions:
            places = [place for place in sweep.drawn if place.dimension == dimension]
            curves.append(
                Curve(
                    name=f"dimension {dimension}, rate {sweep.rate:g}",
                    x=tuple(place.norm("network") for place in places),
                    y=tuple(place.loss for place in places),
                )
            )
    return Figure(
        name=f"word2vec-{sweeps[0].model}",
        title=f"Skip-gram, {MODEL_NAMES[sweeps[0].model]}: norm at the start and training loss",
        x_label="‖H‖ of the network at the start (Gauss-Newton)",
        y_label="training loss, last tenth",
        curves=tuple(curves),
        log_x=True,
        log_y=True,
        style="points",
    )


def curves_figure(sweep: Sweep, dimension: int, steps: int) -> Figure:
    """Loss over training, a line for each standard deviation."""
    places = [place for place in sweep.places if place.dimension == dimension]
    points = len(places[0].curve)
    middles = tuple((place + 0.5) * steps / points for place in range(points))
    return Figure(
        name=f"word2vec-{sweep.model}-curves",
        title=f"Skip-gram, {MODEL_NAMES[sweep.model]}, dimension {dimension}, rate {sweep.rate:g}",
        x_label=f"step, of {BATCH} pairs",
        y_label="training loss",
        curves=tuple(
            Curve(name=place.row if place.row == OURS else f"std {place.row}", x=middles, y=place.curve)
            for place in places
        ),
        log_y=True,
    )
