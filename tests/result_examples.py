"""Comparisons, tracked runs and a reproduction made by hand; nothing in them was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hessinit.results.comparison import Comparison, Run
from hessinit.results.reproduction import Curve, Findings, PaperCell, PaperFigure, PaperTable, Reproduction
from hessinit.results.track_record import TrackedPoint, Tracking

Losses = Mapping[tuple[str, float], Sequence[float | None]]


def make_run(scheme: str, rate: float, seed: int, final: float | None, **changes: Any) -> Run:
    """A run that begins at 2 and ends at `final`; None: the scheme does not apply."""
    applies, finite = final is not None, final is not None and math.isfinite(final)
    given: dict[str, Any] = {
        "losses": (2.0, final) if finite else (2.0, 50.0) if applies else (),
        "first_loss": 2.0 if applies else math.nan,
        "final_loss": final if final is not None else math.nan,
        "steps_done": (20 if finite else 12) if applies else 0,
        "diverged": applies and (not finite or final > 2.1),
        "norms": {"fc1": 3.0, "fc2": 1.0, "network": 4.0} if applies else None,
        "note": "" if applies else "it needs residual branches",
        "seconds": 0.1,
    }
    return Run(scheme=scheme, learning_rate=rate, seed=seed, **{**given, **changes})


def make_comparison(losses: Losses, **changes: Any) -> Comparison:
    """One entry of `losses` for each scheme and learning rate: the final losses by seed."""
    seeds = len(next(iter(losses.values())))
    given: dict[str, Any] = {
        "kind": "compare",
        "schemes": tuple(dict.fromkeys(scheme for scheme, _ in losses)),
        "learning_rates": tuple(dict.fromkeys(rate for _, rate in losses)),
        "seeds": tuple(range(seeds)),
        "runs": tuple(
            make_run(scheme, rate, seed, final)
            for (scheme, rate), finals in losses.items()
            for seed, final in enumerate(finals)
        ),
        "steps": 20,
        "batch_size": 8,
        "optimizer": "sgd",
        "examples": 100,
        "seconds": 1.5,
        "versions": {"torch": "2.13.0"},
    }
    return Comparison(**{**given, **changes})


def two_schemes() -> Comparison:
    """he is lowest at 0.1 and diverges at 1; lsuv is lower at its best rate and trains at both."""
    losses = {("he", 0.1): (1.0, 1.2), ("he", 1.0): (0.9, math.inf)}
    return make_comparison({**losses, ("lsuv", 0.1): (1.4, 1.6), ("lsuv", 1.0): (0.5, 0.6)})


def make_sweep(losses: Mapping[float, Sequence[float]], norms: Mapping[float, float]) -> Comparison:
    """A sweep at the learning rate 0.1."""
    named = {(f"std {std!r}", 0.1): finals for std, finals in losses.items()}
    runs = tuple(
        make_run(f"std {std!r}", 0.1, seed, final, norms={"fc1": norms[std] / 2, "network": norms[std]})
        for std, finals in losses.items()
        for seed, final in enumerate(finals)
    )
    return make_comparison(named, kind="sweep", stds=tuple(losses), runs=runs)


def example_comparison() -> Comparison:
    """Four schemes at five rates with three seeds: he diverges at the largest rate, fixup does not apply."""
    norms = {"default": (2.1, 0.3), "he": (31.0, 1.0), "lsuv": (14.0, 1.1), "hessinit": (math.nan, 1.2)}
    runs = []
    for rate in (0.003, 0.01, 0.03, 0.1, 0.3):
        for scheme, (norm, speed) in norms.items():
            adapted = scheme == "hessinit"
            sharpness = min(2 / rate, 60.0) if adapted else norm
            for seed in range(3):
                measured = adapted or rate == 0.003
                runs.append(_descend(scheme, rate, seed, sharpness, speed, measured=measured))
        runs += [make_run("fixup", rate, seed, None) for seed in range(3)]
    return _of_runs(runs, rate_dependent=("hessinit",))


def example_sweep() -> Comparison:
    """Five standard deviations at one rate with three seeds; the largest one diverges."""
    norms = {1.0: 900.0, 0.5: 120.0, 0.1: 5.2, 0.05: 1.3, 0.005: 0.012}
    runs = [
        _descend(f"std {std:g}", 0.01, seed, norm, 4.0) for std, norm in norms.items() for seed in range(3)
    ]
    return _of_runs(runs, kind="sweep", stds=tuple(norms))


def _of_runs(runs: list[Run], **changes: Any) -> Comparison:
    losses = {(run.scheme, run.learning_rate): (0.0,) * 3 for run in runs}
    given = {
        "runs": tuple(runs),
        "steps": 200,
        "batch_size": 64,
        "examples": 1797,
        "seconds": 41.0,
        **changes,
    }
    return make_comparison(losses, **given)


def _descend(scheme: str, rate: float, seed: int, norm: float, speed: float, *, measured: bool = True) -> Run:
    first = math.log(10) * (1 + 0.02 * seed + norm / 300)
    diverges = rate * norm > 4 + seed
    fall = speed * (min(rate, 2 / norm) * 40 + 0.3 * min(rate * norm, 2))
    losses = [first * 3**point for point in range(12)]
    if not diverges:
        losses = [first * math.exp(-fall * point / 50) + 0.004 * (seed + 1) for point in range(1, 51)]
    norms = {"fc1": 0.6 * norm, "fc2": 0.3 * norm, "fc3": 0.5 * norm, "network": norm}
    ends = {"first_loss": first, "diverged": diverges, "losses": tuple(losses)}
    steps = {"steps_done": 4 * len(losses), "norms": norms if measured else None}
    return make_run(scheme, rate, seed, math.inf if diverges else losses[-1], **ends, **steps)


def make_point(step: int, norm: float, ratio: float | None = None, **changes: Any) -> TrackedPoint:
    """A point whose learning rate, 0.1, is `ratio` times the stability limit."""
    lr = None if ratio is None else 0.1
    given: dict[str, Any] = {
        "loss": 1.0,
        "lr": lr,
        "lr_times_norm": None if lr is None else lr * norm,
        "stable_learning_rate": 0.1 / ratio if ratio else math.inf,
        "lr_over_limit": ratio,
        "converged": math.isfinite(norm),
    }
    shared = {"seconds": 1.0, "measuring_seconds": 0.02, "error": 0.0}
    return TrackedPoint(step=step, norm=norm, **{**shared, **given, **changes})


def example_tracking(points: int = 13, name: str = "", speed: float = 1.0) -> Tracking:
    """A network that sharpens until its learning rate reaches the stability limit, and stays there."""
    found = []
    for number in range(points):
        step = 20 * number
        norm = min(3.0 * math.exp(speed * step / 75), 20.0 + 0.6 * math.sin(step))
        layers = {"fc1": 0.2 * norm, "fc2": 0.3 * norm, "fc3": 0.8 * norm}
        losses = {"loss": _loss(step), "training_loss": _loss(step) if step else None}
        found.append(make_point(step, norm, norm / 20, layers=layers, **losses))
    return Tracking(
        points=tuple(found),
        losses=tuple((step, _loss(step)) for step in range(1, 20 * (points - 1) + 1)),
        optimizer="SGD",
        curvature="gauss-newton",
        every=20,
        max_overhead=0.1,
        examples=256,
        seconds=0.4 + 0.2 * points,
        versions={"hessinit": "0.1.0", "torch": "2.6.0"},
        name=name,
    )


def _loss(step: int) -> float:
    return 2.35 * math.exp(-step / 90)


def make_cell(row: str, column: str, ours: float, **changes: Any) -> PaperCell:
    return PaperCell(**{"row": row, "column": column, "ours": ours, "n": 5, **changes})


def make_table(*cells: PaperCell, **changes: Any) -> PaperTable:
    rows, columns = ([getattr(cell, name) for cell in cells] for name in ("row", "column"))
    given = {"title": "A table", "corner": "std", "rows": tuple(dict.fromkeys(rows))}
    return PaperTable(cells=cells, **{**given, "columns": tuple(dict.fromkeys(columns)), **changes})


def make_reproduction(*tables: PaperTable, **changes: Any) -> Reproduction:
    """A record of five seeds on mnist with these tables."""
    findings = {name: changes.pop(name) for name in ("figures", "sentences") if name in changes}
    given: dict[str, Any] = {
        "name": "table-4-mnist",
        "experiment": "table-4",
        "title": "Table 4: the std of the weights, their Hessians and the training loss",
        "data": "mnist",
        "variant": "two-hidden",
        "about_variant": "784–64–64–10 with ReLU.",
        "seeds": (0, 1, 2, 3, 4),
        "configuration": {"widths": [784, 64, 64, 10], "learning_rate": 0.01},
        "source": "60,000 images in the official idx files",
        "revision": "example",
        "versions": {"torch": "2.13.0"},
        "hardware": {"processor": "made up"},
        "seconds": 187.0,
        "results": {f"seed-{seed}": {"loss": 0.3} for seed in range(5)},
    }
    return Reproduction(findings=Findings(tables=tables, **findings), **{**given, **changes})


def example_reproduction(name: str = "table-4-mnist", **changes: Any) -> Reproduction:
    """Four standard deviations: five of six claims hold, one curve and three points diverge."""
    printed = {
        "1.000": ((24.48, 33.2, 2.13), (8.65, 0.9854, 0.012)),
        "0.100": ((2.34, 1.852, 0.061), (0.32, 0.305, 0.0021)),
        "0.005": ((0.005, 0.0042, 0.0001), (0.42, 0.4412, 0.0031)),
        "hessinit": ((None, 61.3, 4.1), (None, 0.291, 0.0019)),
    }
    cells = []
    for row, pairs in printed.items():
        for column, (paper, ours, error) in zip(("Hessian 1", "Training loss"), pairs, strict=True):
            rule = "within a factor of 10" if row == "1.000" else "within 50 %"
            outside = ours == 0.9854
            judged = {} if paper is None else {"paper": paper, "rule": rule, "within": not outside}
            cells.append(make_cell(row, column, ours, error=error, **judged))
    shares = [make_cell(f"Dense {n}", "rtol ≤ 1", 78.0, error=2.1, n=400, unit="%") for n in (1, 2)]
    gelu = make_table(*shares, title="The same with GELU", corner="layer", note="Relative errors.")
    findings = {"figures": _figures(), "sentences": ("The loss is lowest at 0.100.",)}
    return make_reproduction(
        make_table(*cells, title="As printed"), gelu, name=name, **{**findings, **changes}
    )


def _figures() -> tuple[PaperFigure, PaperFigure]:
    steps = tuple(float(62 * chunk + 31) for chunk in range(60))
    curves = []
    for place, name in enumerate(("1.000", "0.100", "0.005", "hessinit")):
        loss = [0.3 + 0.02 * place + 9 / (place + 1) * math.exp(-((step / 62) ** 0.5)) for step in steps]
        loss[40:] = [math.inf] * 20 if place == 0 else loss[40:]
        error = tuple(0.04 * each if math.isfinite(each) else math.nan for each in loss)
        curves.append(Curve(name=name, x=steps, y=tuple(loss), error=error))
    points = []
    for dimension in (16, 64, 128):
        norms = tuple(dimension / 100 * 10.0**power for power in range(-4, 3))
        losses = (*(5.6 + 0.05 * math.log10(norm) ** 2 - dimension / 400 for norm in norms[:-1]), math.inf)
        points.append(Curve(name=f"dimension {dimension}", x=norms, y=losses, error=(0.02,) * 7))
    steps_and_loss = {"x_label": "step", "y_label": "training loss", "log_y": True}
    norm_and_loss = {"x_label": "‖H‖ at initialization", "y_label": "final loss", "log_x": True}
    return (
        PaperFigure(name="figure-1", title="Loss by std", curves=tuple(curves), **steps_and_loss),
        PaperFigure(
            name="word2vec", title="Norm and loss", curves=tuple(points), style="points", **norm_and_loss
        ),
    )
