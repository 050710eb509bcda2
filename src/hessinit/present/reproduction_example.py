"""A made-up reproduction, for demos, doctests and tests; nothing in it was measured."""

from __future__ import annotations

import math

from hessinit.results.reproduction import Cell, Curve, Figure, Findings, Reproduction, Table

COLUMNS = ("Hessian 1", "Hessian 2", "Training loss")
# Printed, then ours with its standard error; None where the paper has no such row.
ROWS: dict[str, tuple[tuple[float | None, float, float | None], ...]] = {
    "1.000": ((24.48, 33.2, 2.13), (10.06, 31.4, 1.8), (8.65, 0.9854, 0.012)),
    "0.500": ((12.88, 15.1, 0.71), (10.09, 19.3, 0.92), (1.15, 0.523, 0.004)),
    "0.100": ((2.34, 1.852, 0.061), (2.76, 2.39, 0.09), (0.32, 0.305, 0.0021)),
    "0.050": ((0.49, 0.43, 0.013), (0.65, 0.561, 0.017), (0.33, 0.3171, 0.0018)),
    "0.005": ((0.005, 0.0042, 0.0001), (0.006, 0.0056, 0.00017), (0.42, 0.4812, 0.0031)),
    "hessinit": ((None, 61.3, 4.1), (None, 88.0, 5.2), (None, 0.291, 0.0019)),
}
SHARES = {"Dense 1": (46.0, 78.0, 90.0), "Dense 2": (73.0, 97.0, 100.0), "Dense 5": (100.0,) * 3}
TOLERANCES = ("rtol ≤ 0.5", "rtol ≤ 1", "rtol ≤ 1.5")
SLOPES = {"1.000": 1.1, "0.500": 0.9, "0.100": 0.7, "0.050": 0.6, "0.005": 0.35, "hessinit": 0.95}


def example_reproduction(name: str = "table-4-mnist") -> Reproduction:
    """A sweep over six starts of five seeds: most claims hold, two do not, and one curve breaks off."""
    return Reproduction(
        name=name,
        experiment="table-4",
        title="Table 4: the std of the weights, their Hessians and the training loss",
        data="mnist",
        variant="two-hidden",
        about_variant="784–64–64–10 with ReLU; the two hidden weights carry the std, the last is Glorot's.",
        findings=Findings(
            tables=(_sweep_table(), _shares_table()),
            figures=(_curves_figure(), _points_figure()),
            sentences=(
                "The loss is lowest at 0.100, where both norms (largest |eigenvalue|) are near 2.",
                "At std 1.000 no variant that we tried comes near the printed loss of 8.65.",
            ),
        ),
        seeds=(0, 1, 2, 3, 4),
        configuration={"widths": [784, 64, 64, 10], "learning_rate": 0.01, "batch": 32, "epochs": 2},
        source="60,000 images in the official idx files",
        revision="example",
        versions={"hessinit": "example", "torch": "2.13.0"},
        hardware={"processor": "made up", "cores": "2"},
        seconds=187.0,
        results={f"{row}/seed-{seed}": {"loss": 0.3} for row in ROWS for seed in range(5)},
    )


def _sweep_table() -> Table:
    cells = []
    for row, triples in ROWS.items():
        for column, (paper, ours, error) in zip(COLUMNS, triples, strict=True):
            rule = "" if paper is None else _rule(row, column)
            within = None if paper is None else _within(rule, ours, paper)
            cells.append(
                Cell(
                    row=row, column=column, ours=ours, error=error, n=5, paper=paper, rule=rule, within=within
                )
            )
    return Table(title="As printed", corner="std", rows=tuple(ROWS), columns=COLUMNS, cells=tuple(cells))


def _rule(row: str, column: str) -> str:
    if row in ("1.000", "0.500"):
        return "within a factor of 10"
    return "within 0.05" if column == "Training loss" else "within 50 %"


def _within(rule: str, ours: float, paper: float) -> bool:
    if rule == "within a factor of 10":
        return max(ours / paper, paper / ours) < 10 and ours != 0.9854  # so that two claims fail
    return abs(ours - paper) <= (0.05 if rule == "within 0.05" else paper / 2)


def _shares_table() -> Table:
    cells = [
        Cell(
            row=row, column=column, ours=share, error=math.sqrt(share * (100 - share) / 400), n=400, unit="%"
        )
        for row, shares in SHARES.items()
        for column, share in zip(TOLERANCES, shares, strict=True)
    ]
    return Table(
        title="Beyond the paper: the same with GELU",
        corner="layer",
        rows=tuple(SHARES),
        columns=TOLERANCES,
        cells=tuple(cells),
        note="Errors are relative to the approximation.",
    )


def _curves_figure() -> Figure:
    steps = tuple(float(62 * chunk + 31) for chunk in range(60))
    curves = []
    for place, (name, slope) in enumerate(SLOPES.items()):
        start = 40.0 if place == 0 else 2.3 + 3 * (place == 1)
        loss = [0.28 + 0.02 * place + start * math.exp(-slope * (step / 62) ** 0.5) for step in steps]
        if place == 0:
            loss[40:] = [math.inf] * 20
        error = tuple(0.04 * each if math.isfinite(each) else math.nan for each in loss)
        curves.append(Curve(name=name, x=steps, y=tuple(loss), error=error))
    return Figure(
        name="figure-1",
        title="Loss per batch, by std",
        x_label="step",
        y_label="training loss",
        curves=tuple(curves),
        log_y=True,
    )


def _points_figure() -> Figure:
    curves = []
    for dimension in (16, 64, 128):
        norms = tuple(dimension / 100 * 10.0**power for power in range(-4, 3))
        losses = tuple(5.6 + 0.05 * math.log10(norm) ** 2 - dimension / 400 for norm in norms[:-1])
        curves.append(Curve(name=f"dimension {dimension}", x=norms, y=(*losses, math.inf), error=(0.02,) * 7))
    return Figure(
        name="word2vec-softmax",
        title="Curvature at the start and loss at the end",
        x_label="‖H‖ of the network at the start",
        y_label="final training loss",
        curves=tuple(curves),
        log_x=True,
        style="points",
    )
