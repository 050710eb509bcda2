"""What the correlations of Table 1 say: how many seeds detect one, how large it is, what noise gives."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from hessinit.paper.experiment import Setting
from hessinit.paper.printed import judged_cell, make_cell, printed
from hessinit.paper.scipy_extra import import_stats
from hessinit.results.reproduction import Cell, Findings, Table
from hessinit.results.result import Plain, read_number

SIGNIFICANCE = 0.05
TESTS = 10  # the paper counts detections out of ten
Results = Mapping[str, Sequence[Plain]]  # of all seeds, by row


def conclude(setting: Setting, results: Results, samples: Mapping[str, int]) -> Findings:
    """The paper's table, the correlations beside their formulas, and the control."""
    return Findings(
        tables=(paper_table(setting, results), correlations_table(results), control_table(results)),
        sentences=tuple(say(setting, results, samples)),
    )


def paper_table(setting: Setting, results: Results) -> Table:
    cells = []
    for row, seeds in results.items():
        p = column_of(seeds, "relu", "p")
        cells += [
            judged_cell("table-1", setting.data, row, "dependent", detected(p), error=None, n=len(p)),
            make_cell("table-1", setting.data, row, "mean p", p),
        ]
    return Table(
        title="Pearson's r at 95 %: in how many of ten seeds a dependence is detected",
        corner="Gradients",
        rows=tuple(results),
        columns=("dependent", "mean p"),
        cells=tuple(cells),
        note="dependent counts the seeds with p < 0.05, out of ten; the components were fixed beforehand "
        "(outputs 0 and 1, and output 0 by unit 0 of the layer before).",
    )


def correlations_table(results: Results) -> Table:
    cells = []
    for row, seeds in results.items():
        for activation, name in (("relu", row), ("tanh", f"{row}; tanh")):
            n = len(seeds)
            for column in ("r", "expected r"):
                values = column_of(seeds, activation, column)
                error = statistics.stdev(values) / math.sqrt(n) if n > 1 else None
                cells.append(Cell(row=name, column=column, ours=statistics.fmean(values), error=error, n=n))
            count = detected(column_of(seeds, activation, "p"))
            cells.append(Cell(row=name, column="dependent", ours=count, n=n))
    return Table(
        title="The correlations themselves, and with tanh in place of ReLU",
        corner="Gradients",
        rows=tuple(dict.fromkeys(cell.row for cell in cells)),
        columns=("r", "expected r", "dependent"),
        cells=tuple(cells),
        note="expected r comes from formulas that hold over initializations, with averages of single "
        "variables put in; ± is the standard error over seeds.",
    )


def control_table(results: Results) -> Table:
    cells = []
    for row, seeds in results.items():
        p = [read_number(value) for seed in seeds for value in seed["shuffled p"]]
        share = statistics.fmean(value < SIGNIFICANCE for value in p)
        error = 100 * math.sqrt(share * (1 - share) / len(p))
        cells.append(Cell(row=row, column="dependent", ours=100 * share, error=error, n=len(p), unit="%"))
    return Table(
        title="Control: the same samples with one gradient shuffled, where there is nothing to detect",
        corner="Gradients",
        rows=tuple(results),
        columns=("dependent",),
        cells=tuple(cells),
        note="The share of shuffles with p < 0.05; an honest test gives 5 %.",
    )


def say(setting: Setting, results: Results, samples: Mapping[str, int]) -> Iterator[str]:
    """The findings in whole sentences."""
    outputs, layer = results
    r = {row: statistics.fmean(column_of(seeds, "relu", "r")) for row, seeds in results.items()}
    expected = {
        row: statistics.fmean(column_of(seeds, "relu", "expected r")) for row, seeds in results.items()
    }
    yield (
        f"Different components of ∂L/∂out have r = {r[outputs]:.3f} ({samples[outputs]:,} samples, mean of "
        f"{len(results[outputs])} seeds; {expected[outputs]:.3f} expected): {WHY_OUTPUTS[setting.variant]}"
    )
    yield (
        f"∂L/∂out6 and ∂out6/∂out5 have r = {r[layer]:.4f} ({samples[layer]:,} samples, mean of "
        f"{len(results[layer])} seeds; {expected[layer]:.4f} expected): {WHY_LAYER[setting.variant]}"
    )
    if setting.variant != "softmax-layer":
        tanh = statistics.fmean(column_of(results[layer], "tanh", "r"))
        count = detected(column_of(results[layer], "tanh", "p"))
        yield (
            "With tanh there is no such correlation: turning the signs of all weights into and out of a "
            f"hidden unit changes no output, so r is 0 by symmetry (measured {tanh:.4f}, detected in "
            f"{count:g} of ten seeds). Pearson's test sees the paper's effect only where activations have a "
            "mean."
        )
    yield from say_printed(setting, r, samples)


def say_printed(setting: Setting, r: Mapping[str, float], samples: Mapping[str, int]) -> Iterator[str]:
    """What r the printed p-values speak of."""
    table = printed("table-1")
    if table["data"] != setting.data:
        return
    implied = {
        row: float(import_stats().norm.isf(table["rows"][row]["mean p"] / 2)) / math.sqrt(count)
        for row, count in samples.items()
    }
    (first, second) = implied
    yield (
        f"The printed p-values speak of |r| near {implied[first]:.3f} and {implied[second]:.4f}; ours are "
        f"{abs(r[first]):.3f} and {abs(r[second]):.4f}. Nothing is claimed about p: it depends on widths, "
        "activation and components, none of which the paper gives."
    )


WHY_OUTPUTS = {
    "one-image": "the ten probabilities sum to 1 and are exchangeable over initializations, so r is −1/9 "
    "whatever the network.",
    "new-image": "the ten probabilities sum to 1 and only one label is right, both of which give about −1/9.",
    "softmax-layer": "−y/p is nonzero for the right label alone, so one component excludes the other.",
}
WHY_LAYER = {
    "one-image": "a larger weight on a positive hidden unit raises its own output's probability, "
    "E[(p − y) W] = σ² E[p (1 − p) h], and ReLU's h is never negative.",
    "new-image": "a larger weight on a positive hidden unit raises its own output's probability, "
    "E[(p − y) W] = σ² E[p (1 − p) h], but the label's variance hides most of it.",
    "softmax-layer": "where the label is right, −1/p rises with p, and so does p (1 − p).",
}


def detected(p: Sequence[float]) -> float:
    """How many are significant, out of ten.

    >>> detected([0.01] * 9 + [0.2]), detected([0.01, 0.2])
    (9.0, 5.0)
    """
    return TESTS * sum(value < SIGNIFICANCE for value in p) / len(p)


def column_of(seeds: Sequence[Plain], activation: str, column: str) -> list[float]:
    return [read_number(seed[activation][column]) for seed in seeds]
