"""`hessinit measure`, the curvature of the user's own network, and `hessinit show`, a saved result."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hessinit.cli import options
from hessinit.cli.failures import NOT_CONVERGED, failures_explained, interruption_explained, stop
from hessinit.cli.output import Output, progress
from hessinit.cli.problem_file import file_of, find_problem, load_problem, similar_name

if TYPE_CHECKING:
    from hessinit.results.curvature_report import CurvatureReport


def measure(
    problem: options.Problem,
    lr: Annotated[
        float | None,
        typer.Option(
            callback=options.check_rate, metavar="X", help="Also say whether this learning rate is stable."
        ),
    ] = None,
    curvature: Annotated[
        Literal["gauss-newton", "hessian", "both"] | None,
        typer.Option(help="Which second derivative.  [default: gauss-newton]"),
    ] = None,
    layers: options.Layers = None,
    tolerance: options.Tolerance = None,
    jacobians: Annotated[
        bool, typer.Option("--jacobians", help="Also the Jacobian norms around each layer, and bounds.")
    ] = False,
    diagnostics: Annotated[
        bool, typer.Option("--diagnostics", help="Also activations, gradients, dead and saturated units.")
    ] = False,
    seed: options.Seed = None,
    device: options.Device = None,
    threads: options.Threads = None,
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
      hessinit measure package.module:problem --json > report.json

    \b
    where net.py holds, for example:
      def problem():
          model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 3))
          batch = torch.randn(32, 20), torch.randint(3, (32,))
          return model, nn.CrossEntropyLoss(), batch

    `hessinit new` writes such a file.

    Exit status: 0 done, 1 not converged, 2 wrong usage, 130 interrupted.
    """
    output = Output(as_json, html, save, picture)
    output.check(reads=file_of(problem))
    chosen = options.given(
        curvature=curvature, layers=layers, tolerance=tolerance, seed=seed, jacobians=jacobians,
        diagnostics=diagnostics,
    )  # fmt: skip
    with (
        interruption_explained("the measurement was not finished, and nothing was written."),
        failures_explained(f"measuring {problem}"),
    ):
        place = find_problem(problem)
        with progress(f"Measuring {problem} …"):
            import hessinit

            loaded = load_problem(place, seed=seed, device=device, threads=threads)
            report = hessinit.measure(
                loaded.model, loaded.loss, loaded.batch, **{**loaded.keywords, **chosen}
            )
    output.write(report, after=None if lr is None else judge_rate(report, lr, problem))
    if not report.converged:
        missed = f"the report marks what did not reach tolerance {report.tolerance:g}."
        stop(f"Not converged: {missed}", NOT_CONVERGED)


def judge_rate(report: CurvatureReport, lr: float, problem: str) -> str:
    """Return lr·‖H‖, whether gradient descent is stable there, and what to do where it is not."""
    from hessinit.present.words import format_number

    advice = report.advice("sgd", lr=lr)
    norm, rate = report.network.norm, format_number(lr)
    if not report.network_measured:
        return f"lr = {rate}: the network's ‖H‖ was not measured, only bounded (network=False)."
    if not 0 < norm < math.inf:
        return f"lr = {rate}: {advice.stable_reason[0].lower()}{advice.stable_reason[1:]}"
    product = f"lr·‖H‖ = {rate}·{format_number(norm)} = {format_number(lr * norm)}"
    # Along a direction of negative curvature no step is too long.
    curves_down = -report.network.bottom_eigenvalue > report.network.top_eigenvalue
    if lr <= advice.stable_learning_rate:
        place = "below" if lr < advice.stable_learning_rate else "at"
        if curves_down:
            return (
                f"{product}, {place} 2: a gradient step in these weights lowers the loss at initialization."
            )
        return f"{product}, {place} 2: gradient descent in these weights is stable at initialization."
    if curves_down:
        return f"{product}, above 2: a gradient step of this length is not guaranteed to lower the loss."
    return (
        f"{product}, above 2: gradient descent is unstable at initialization. {advice.warmup.reason}\n"
        f"Next: hessinit initialize {shlex.quote(problem)} --lr {lr:g}"
    )


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
    output = Output(as_json, html, picture=picture)
    output.check(reads=path)
    loaded = _load(path)
    if isinstance(loaded, list) and picture is not None:
        stop(f"--picture {picture} draws one record, and the file holds {len(loaded)}; show one of them.")
    output.write(loaded)


def _load(path: Path) -> Any:
    from hessinit.results.result import load

    try:
        return load(path)
    except FileNotFoundError:
        found = (each.name for each in path.parent.glob("*.json*")) if path.parent.is_dir() else ()
        stop(f"{path} does not exist.{similar_name(path.name, found)}")
    except OSError as failure:
        stop(f"{path} cannot be read: {failure.strerror}.")
    except ValueError as refusal:
        stop(str(refusal))
