"""What the results of a std sweep say: the paper's table, our additions, the figure, and sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hessinit.paper.experiment import Setting
from hessinit.paper.printed import make_cell
from hessinit.paper.std_sweep import HESSIAN_BATCH, OURS, Sweep, job_key
from hessinit.paper.std_sweep_sentences import write_sentences
from hessinit.paper.std_sweep_values import Values, mean_and_error, power_of_std
from hessinit.paper.training import chunk_length, chunk_middles
from hessinit.results.reproduction import Cell, Curve, Figure, Findings, Table
from hessinit.results.result import Plain, read_number, read_numbers

CORNER = "Weights std."
POWER = "power of the std"


def conclude(sweep: Sweep, setting: Setting, results: Mapping[str, Plain]) -> Findings:
    values = gather(sweep, setting, results)
    return Findings(
        tables=(
            paper_table(sweep, setting, values),
            scaling_table(sweep, values),
            network_table(sweep, setting, values),
        ),
        figures=(loss_figure(sweep, setting, results),),
        sentences=write_sentences(sweep, setting, values),
    )


def gather(sweep: Sweep, setting: Setting, results: Mapping[str, Plain]) -> dict[str, Values]:
    """The numbers of every row, over restarts and over seeds."""
    gathered = {}
    for row in sweep.rows:
        norms = [results[job_key("norms", row, seed)] for seed in setting.seeds]
        trainings = [results[job_key("training", row, seed)] for seed in setting.seeds]
        gathered[row] = Values(
            approximate=by_weight(norms, "approximate"),
            exact=by_weight(norms, "exact"),
            network=tuple(read_number(norm) for part in norms for norm in part["network"]),
            losses=tuple(read_number(training["training loss"]) for training in trainings),
        )
    return gathered


def by_weight(norms: Sequence[Plain], kind: str) -> tuple[tuple[float, ...], ...]:
    """The norms of the first weight at all starts, then those of the second."""
    return tuple(zip(*(read_numbers(pair) for part in norms for pair in part[kind]), strict=True))


def paper_table(sweep: Sweep, setting: Setting, values: Mapping[str, Values]) -> Table:
    cells = []
    for row, found in values.items():
        columns = {
            "Hessian 1": found.approximate[0],
            "Hessian 2": found.approximate[1],
            "Training loss": found.losses,
            "exact 1": found.exact[0],
            "exact 2": found.exact[1],
        }
        cells += [
            make_cell(sweep.experiment, setting.data, row, name, column) for name, column in columns.items()
        ]
    recipe = sweep.variant(setting).recipe_for(setting.data)
    return Table(
        title="Hessians at the start and training loss",
        corner=CORNER,
        rows=sweep.rows,
        columns=tuple(columns),
        cells=tuple(cells),
        note=f"Hessian: largest |eigenvalue| of the weight's block on a random batch of {HESSIAN_BATCH}, by "
        f"Theorem 1; exact: without approximation. Training loss: mean of the last {recipe.last} "
        f"mini-batches of {recipe.epochs} epochs.",
    )


def scaling_table(sweep: Sweep, values: Mapping[str, Values]) -> Table:
    """Norm / std², which is one number down a column if the norm grows as std²."""
    cells = []
    for number in (0, 1):
        column = f"Hessian {number + 1} / std²"
        for row in sweep.stds:
            ratios = [norm / float(row) ** 2 for norm in values[row].approximate[number]]
            cells.append(own_cell(row, column, ratios))
        cells.append(own_cell(POWER, column, power_of_std(values, sweep.scaling, number)))
    return Table(
        title="How the Hessians grow with the std",
        corner=CORNER,
        rows=(*sweep.stds, POWER),
        columns=("Hessian 1 / std²", "Hessian 2 / std²"),
        cells=tuple(cells),
        note=f"Power: least squares in logarithms over {', '.join(sweep.scaling)}, for each start by itself.",
    )


def network_table(sweep: Sweep, setting: Setting, values: Mapping[str, Values]) -> Table:
    """The norm that bounds the learning rate: that of all weights together."""
    rate = sweep.variant(setting).recipe.learning_rate
    cells = []
    for row, found in values.items():
        cells.append(own_cell(row, "network", found.network))
        cells.append(own_cell(row, "lr · network", [rate * norm for norm in found.network]))
    return Table(
        title="All weights together",
        corner=CORNER,
        rows=sweep.rows,
        columns=("network", "lr · network"),
        cells=tuple(cells),
        note="Largest eigenvalue of the Gauss-Newton matrix of all weights; descent on that batch is stable "
        "up to lr · network = 2.",
    )


def own_cell(row: str, column: str, values: Sequence[float]) -> Cell:
    """Mean and standard error of numbers that the paper does not print."""
    return make_cell("", "", row, column, values)


def loss_figure(sweep: Sweep, setting: Setting, results: Mapping[str, Plain]) -> Figure:
    curves = []
    for row in sweep.rows:
        trainings = [results[job_key("training", row, seed)] for seed in setting.seeds]
        name = row if row == OURS else f"std {row}"
        curves.append(mean_curve(name, trainings[0]["steps"], [training["curve"] for training in trainings]))
    return Figure(
        name=sweep.figure,
        title=sweep.figure_title,
        x_label="step",
        y_label="loss of a mini-batch",
        curves=tuple(curves),
        log_y=sweep.log_loss,
    )


def mean_curve(name: str, steps: int, curves: Sequence[Plain]) -> Curve:
    """The mean over seeds, up to where the first of them breaks off."""
    points = [
        point for point in zip(*map(read_numbers, curves), strict=False) if all(map(math.isfinite, point))
    ]
    means, errors = zip(*map(mean_and_error, points), strict=True) if points else ((), ())
    return Curve(
        name=name,
        x=tuple(chunk_middles(steps, chunk_length(steps))[: len(points)]),
        y=means,
        error=errors if len(curves) > 1 else None,
    )
