"""`hessinit measure`, the curvature of the user's own network, and `hessinit show`, a saved result."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hessinit.cli.failures import NOT_CONVERGED, failures_explained, interruption_explained, stop
from hessinit.cli.options import (
    AsHtml,
    AsJson,
    Curvature,
    Device,
    Layers,
    Picture,
    Problem,
    Save,
    Seed,
    Threads,
    Tolerance,
    check_rate,
    given,
    split,
)
from hessinit.cli.output import Output, progress
from hessinit.cli.problem_file import did_you_mean_file, file_of, find_problem, load_problem

if TYPE_CHECKING:
    from hessinit.results.curvature_report import CurvatureReport


def measure(
    problem: Problem,
    lr: Annotated[
        float | None,
        typer.Option(callback=check_rate, metavar="X", help="Also say whether this learning rate is stable."),
    ] = None,
    curvature: Annotated[
        Curvature | None, typer.Option(help="Which second derivative.  [default: gauss-newton]")
    ] = None,
    layers: Layers = None,
    tolerance: Tolerance = None,
    jacobians: Annotated[
        bool, typer.Option("--jacobians", help="Also the Jacobian norms around each layer, and bounds.")
    ] = False,
    diagnostics: Annotated[
        bool, typer.Option("--diagnostics", help="Also activations, gradients, dead and saturated units.")
    ] = False,
    seed: Seed = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
    html: AsHtml = None,
    save: Save = None,
    picture: Picture = None,
) -> None:
    """Measure every layer of your own network; it stays as it was.

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
    options = given(
        curvature=curvature, layers=split(layers, str), tolerance=tolerance, seed=seed,
        jacobians=jacobians or None, diagnostics=diagnostics or None,
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
                loaded.model, loaded.loss, loaded.batch, **{**loaded.keywords, **options}
            )
    output.write(report, after=None if lr is None else judge_rate(report, lr, problem))
    if not report.converged:
        stop(
            f"Not converged: the report marks what did not reach tolerance {report.tolerance:g}.",
            NOT_CONVERGED,
        )


def judge_rate(report: CurvatureReport, lr: float, problem: str) -> str:
    """lr·‖H‖, whether gradient descent is stable there, and what to do where it is not."""
    from hessinit.present.words import format_number

    advice = report.advice("sgd", lr=lr)
    norm, rate = report.network.norm, format_number(lr)
    if not report.network_measured or not 0 < norm < math.inf:
        return f"lr = {rate}: {advice.stable_reason[0].lower()}{advice.stable_reason[1:]}"
    product = f"lr·‖H‖ = {rate}·{format_number(norm)} = {format_number(lr * norm)}"
    # Along a direction of negative curvature no step is too long.
    curves_down = -report.network.bottom_eigenvalue > report.network.top_eigenvalue
    if lr <= advice.stable_learning_rate:
        holds = (
            "a gradient step in these weights lowers the loss"
            if curves_down
            else "gradient descent in these weights is stable"
        )
        return f"{product}, {'below' if lr < advice.stable_learning_rate else 'at'} 2: {holds} at initialization."
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
    as_json: AsJson = False,
    html: AsHtml = None,
    picture: Picture = None,
) -> None:
    """Print what another command saved. It needs no torch, and no model.

    \b
    Examples:
      hessinit show report.json
      hessinit show report.json --html report.html
      hessinit show comparison.json --picture comparison.pdf
      hessinit show curvature.jsonl --json > curvature.json
      hessinit show table-4-mnist.json --html table-4.html

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
        found = [*path.parent.glob("*.json"), *path.parent.glob("*.jsonl")] if path.parent.is_dir() else []
        stop(f"{path} does not exist.{did_you_mean_file(path, sorted(found))}")
    except OSError as failure:
        stop(f"{path} cannot be read: {failure.strerror}.")
    except ValueError as refusal:
        stop(str(refusal))
