"""The verb `measure`: the curvature of every layer and of the network, before training starts."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hessinit.diagnostics.diagnose import diagnose
from hessinit.engines.ends import Effort
from hessinit.engines.extras import Wanted
from hessinit.errors import ConvergenceError, ConvergenceWarning, ProblemError, choose
from hessinit.operators.evaluation import evaluate
from hessinit.operators.setting import (
    in_running_order,
    note_unchecked,
    note_uncounted,
    notes_on,
    versions_of,
)
from hessinit.problem.checks import check_switches, check_tolerance, check_whole
from hessinit.problem.memory import explained_memory
from hessinit.problem.problem import Forward, Loss, Problem
from hessinit.products.measure import measure_products
from hessinit.results.curvature_report import CurvatureReport, LayerCurvature
from hessinit.rows import Rows


def measure(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    curvature: str = "gauss-newton",
    layers: str | Iterable[str] | None = None,
    estimator: str = "auto",
    tolerance: float = 1e-3,
    max_steps: int = 200,
    seed: int = 0,
    forward: Forward | None = None,
    dtype: torch.dtype | None = None,
    dropout: str = "refuse",
    reduction: str = "auto",
    check: bool = True,
    top: int = 0,
    trace: bool = False,
    frobenius: bool = False,
    density: bool = False,
    jacobians: bool = False,
    diagnostics: bool = False,
    network: bool = True,
    strict: bool = False,
) -> CurvatureReport:
    """How sharp each layer is, and what learning rate that allows; the model is left bit for bit as it was.

    `loss(output, target)` is any callable; `batch` is `(inputs, targets)` or an iterable of such pairs,
    averaged over examples. `curvature` is "gauss-newton" (the paper's approximation; fast), "hessian" (exact)
    or "both" (with the gap between them). `layers` takes names or globs; by default every trainable weight of
    two or more dimensions, and with "**" the biases and norm gains, too. Models that are not called as
    `model(inputs)` pass `forward(model, inputs)`.

    Several batches are averaged over examples, or added up where the loss is a sum: that is found from its
    values, or told by `reduction="mean"` or "sum". The derivatives are checked against finite differences of
    the plain model, which costs about two gradients; what disagrees is refused. `check=False` leaves that
    out.

    Norms are right to `tolerance`, relative; a value that did not get there says so and warns, or raises with
    `strict=True`. `top`, `trace`, `frobenius` and `density` ask for more of the spectrum, `jacobians` for the
    Jacobian products before and after each layer and the bounds they give (the paper's Theorem 2),
    `diagnostics` for the size of activations and gradients, dead and saturated units. `network=False` leaves
    the whole network out and bounds its norm by the layers'.

    Costs 20 to 50 gradients for a classifier with ten outputs, all layers and the network together; with
    diagnostics up to 1.5 times, with Jacobian products 6 to 25 times as much.

    >>> model = nn.Linear(3, 1, bias=False).double()
    >>> inputs = torch.eye(3, dtype=torch.float64)
    >>> report = measure(model, nn.MSELoss(), (inputs, torch.zeros(3, 1)))
    >>> round(report.network.norm, 9)  # closed form: the largest eigenvalue of 2/3 XᵀX
    0.666666667
    """
    started = time.perf_counter()
    choose("curvature", curvature, ["gauss-newton", "hessian", "both"])
    choose("estimator", estimator, ["auto", "gram", "lanczos"])
    if curvature == "hessian" and estimator == "gram":
        raise ProblemError(
            "estimator='gram' measures Gauss-Newton curvature only; for curvature='hessian' choose 'auto' or "
            "'lanczos'."
        )
    check_switches(
        trace=trace, frobenius=frobenius, density=density, jacobians=jacobians, diagnostics=diagnostics,
        network=network, strict=strict,
    )  # fmt: skip
    seed = check_whole("seed", seed, at_least=0)
    effort = Effort(check_tolerance(tolerance), check_whole("max_steps", max_steps, at_least=1), seed)
    wanted = Wanted(
        top=check_whole("top", top, at_least=0), trace=trace, frobenius=frobenius, density=density
    )
    if top > max_steps:
        raise ProblemError(
            f"top={top} with max_steps={max_steps}: every eigenvalue takes a step; pass max_steps={top} or "
            "more."
        )
    problem = Problem(
        model, loss, batch, layers=layers, forward=forward, dtype=dtype, dropout=dropout, reduction=reduction,
        check=check, seed=seed,
    )  # fmt: skip
    with problem.settings(), explained_memory(problem):
        evaluations = evaluate(problem)
        measuring = Rows(problem, evaluations, curvature, estimator, effort, wanted)
        layers_in_order = in_running_order(problem, evaluations)
        rows = measuring.layers(layers_in_order)
        whole = measuring.network() if network else measuring.bounded_network(rows)
        names = [layer.parameter for layer in layers_in_order]
        if jacobians:
            products = measure_products(problem, evaluations, effort)
            rows = tuple(
                replace(row, jacobians=products[name]) for row, name in zip(rows, names, strict=True)
            )
        if diagnostics:
            found = diagnose(problem, evaluations)
            rows = tuple(replace(row, diagnostics=found[name]) for row, name in zip(rows, names, strict=True))
        report = CurvatureReport(
            layers=rows,
            network=whole,
            curvature=curvature,
            loss=sum(one.loss_value * one.weight for one in evaluations),
            examples=problem.examples,
            batches=len(problem.batches),
            tolerance=tolerance,
            seed=seed,
            engine=measuring.main.name,
            engine_reason=measuring.main.reason,
            seconds=time.perf_counter() - started,
            gradients=None,
            notes=(*notes_on(problem, evaluations), *note_unchecked(check), *note_uncounted(problem)),
            versions=versions_of(problem),
        )
    _complain(rows if not network else (*rows, whole), tolerance, strict)
    return report


def _complain(rows: Sequence[LayerCurvature], tolerance: float, strict: bool) -> None:
    loose = [(row.name, row.estimate) for row in rows if not row.converged]
    loose += [
        (f"{row.name} (Gauss-Newton)", row.approximation)
        for row in rows
        if row.approximation is not None and not row.approximation.converged
    ]
    if not loose:
        return
    shown = ", ".join(name for name, _ in loose[:4]) + (" …" if len(loose) > 4 else "")
    message = f"{shown} did not reach tolerance={tolerance:g}: {loose[0][1].reason}."
    if strict:
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=3)
