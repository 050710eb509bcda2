"""`hessinit measure`, the curvature of the user's own network, and `hessinit show`, a saved result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import hessinit
from hessinit.cli import options
from hessinit.cli.failures import NOT_CONVERGED, failures_explained, stop
from hessinit.cli.output import Output, progress
from hessinit.cli.problem_file import find_problem, load_problem
from hessinit.present.words import format_number


def measure(
    problem: options.Problem,
    lr: Annotated[float | None, options.rate("Also say whether this learning rate is stable.")] = None,
    curvature: Annotated[
        Literal["gauss-newton", "hessian", "both"] | None,
        typer.Option(help="Which second derivative.  [default: gauss-newton]"),
    ] = None,
    layers: options.Layers = None,
    tolerance: options.Tolerance = None,
    precision: Annotated[
        Literal["full", "tf32", "bf16"] | None,
        typer.Option(help="full, or on a GPU tf32 or bf16: faster, and the stated errors include it."),
    ] = None,
    jacobians: Annotated[
        bool, typer.Option("--jacobians", help="Also the Jacobian norms around each layer, and bounds.")
    ] = False,
    diagnostics: Annotated[
        bool, typer.Option("--diagnostics", help="Also activations, gradients, dead and saturated units.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would cost: engine, gradients and memory.")
    ] = False,
    seed: options.Seed = None,
    device: options.Device = None,
    as_json: options.AsJson = False,
    html: options.AsHtml = None,
    save: options.Save = None,
    picture: options.Picture = None,
) -> None:
    """Measure the curvature of every layer of your network.

    \b
    Examples:
      hessinit measure net.py:problem
      hessinit measure net.py:problem --lr 0.1 --html report.html
      hessinit measure net.py:problem --curvature both --layers 'conv*'
      hessinit measure net.py:problem --jacobians --diagnostics
      hessinit measure net.py:problem --dry-run
      hessinit measure package.module:problem --json > report.json

    `hessinit new` writes a file with such a function.

    Exit status: 0 done, 1 not converged, 2 wrong usage, 130 interrupted.
    """
    place = find_problem(problem)
    output = Output(as_json, html, save, picture, reads=place.file)
    if dry_run and lr is not None:
        stop(f"--lr {lr:g} is judged by ‖H‖, which --dry-run does not measure; leave out one of them.")
    chosen = options.given(
        curvature=curvature, layers=layers, tolerance=tolerance, precision=precision, seed=seed,
        jacobians=jacobians, diagnostics=diagnostics, plan=dry_run,
    )  # fmt: skip
    unfinished = "the measurement was not finished, and nothing was written."
    with (
        failures_explained(f"measuring {problem}", unfinished),
        progress(f"Measuring {problem} …", measuring=True) as show,
    ):
        loaded = load_problem(place, seed=seed, device=device)
        given = {"progress": show, **loaded.keywords, **chosen}
        report = hessinit.measure(loaded.model, loaded.loss, loaded.batch, **given)
    output.write(report, after=None if lr is None else judge_rate(report, lr, problem))
    if not dry_run and not report.converged:
        missed = f"Not converged: the report marks what did not reach tolerance {report.tolerance:g}."
        stop(missed, NOT_CONVERGED)


def judge_rate(report: hessinit.CurvatureReport, lr: float, problem: str) -> str:
    """Return lr·‖H‖, what the advice says of this learning rate, and the command that helps."""
    if not report.network_measured:
        return f"lr = {lr:g}: the network's ‖H‖ was not measured, only bounded (network=False)."
    advice = report.advice("sgd", lr=lr)
    product = format_number(lr * report.network.norm)
    said = f"lr·‖H‖ = {product}; on a quadratic, gradient descent is stable up to 2. {advice.warmup.reason}"
    if lr <= advice.stable_learning_rate:
        return said
    return f"{said}\nNext: hessinit initialize {problem} --lr {lr:g}"


def show(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="What --save, --json, --log or save() wrote.", show_default=False
        ),
    ],
    as_json: options.AsJson = False,
    html: options.AsHtml = None,
    picture: options.Picture = None,
) -> None:
    """Print what another command saved. It needs no torch, and no model.

    \b
    Examples:
      hessinit show report.json
      hessinit show report.json --html report.html
      hessinit show comparison.json --picture comparison.pdf
      hessinit show curvature.jsonl --json > curvature.json
      hessinit show reproduction/table-4-mnist.json

    Exit status: 0 done, 2 wrong usage.
    """
    output = Output(as_json, html, picture=picture, reads=path)
    try:
        loaded = hessinit.load(path)
    except OSError as failure:
        stop(f"{path} cannot be read: {failure.strerror}.")
    except ValueError as refusal:
        stop(str(refusal))
    output.write(loaded)
