"""`hessinit measure`: the user's own network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hessinit.cli.failures import failures_explained, stop
from hessinit.cli.options import LARGEST_SEED, AsHtml, AsJson, Curvature, Diagnostics, Jacobians
from hessinit.cli.output import Output
from hessinit.cli.progress import working
from hessinit.problem_file import find_problem, load_problem


def _check_tolerance(tolerance: float | None) -> float | None:
    if tolerance is not None and not tolerance > 0:
        raise typer.BadParameter(f"{tolerance} is not positive; give a relative accuracy such as 1e-3.")
    return tolerance


def measure(
    problem: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function without arguments that returns model, loss, batch, and, if needed, a dict of "
            "keyword arguments for hessinit.measure, such as forward. Also as package.module:function.",
            show_default=False,
        ),
    ],
    curvature: Annotated[
        Curvature | None, typer.Option(help="Which second derivative.  [default: gauss-newton]")
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A layer's name or a pattern like 'conv*'; repeat it for more."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            callback=_check_tolerance, metavar="X", help="Relative accuracy of the norms.  [default: 0.001]"
        ),
    ] = None,
    jacobians: Jacobians = False,
    diagnostics: Diagnostics = False,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=LARGEST_SEED,
            metavar="N",
            help="Seeds random, numpy and torch before the file is run.  [default: 0]",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="Move the model there: cpu, cuda, cuda:1, mps …"),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many CPU threads torch may use.")
    ] = None,
    as_json: AsJson = False,
    html: AsHtml = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Also save the report, for `hessinit show`.")
    ] = None,
) -> None:
    """Measure every layer of your own network.

    \b
    Examples:
      hessinit measure net.py:problem
      hessinit measure net.py:problem --curvature both --layers 'conv*'
      hessinit measure net.py:problem --jacobians --diagnostics
      hessinit measure package.module:problem --json > report.json

    \b
    where net.py holds, for example:
      def problem():
          model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 3))
          batch = torch.randn(32, 20), torch.randint(3, (32,))
          return model, nn.CrossEntropyLoss(), batch

    Exit status: 0 done, 1 not converged, 2 wrong usage.
    """
    output = Output(as_json, html, save)
    output.check()
    with failures_explained(problem):
        place = find_problem(problem)
        with working(f"Measuring {problem} …"):
            from hessinit.measuring import measure as measure_curvature

            _prepare_torch(seed or 0, device, threads)
            loaded = load_problem(place)
            if device is not None and hasattr(loaded.model, "to"):
                loaded.model.to(device)  # the batch follows the model
            options = {
                "curvature": curvature.value if curvature else None,
                "layers": layers or None,
                "tolerance": tolerance,
                "seed": seed,
                "jacobians": jacobians or None,
                "diagnostics": diagnostics or None,
            }
            given = {name: value for name, value in options.items() if value is not None}
            report = measure_curvature(
                loaded.model, loaded.loss, loaded.batch, **{**loaded.keywords, **given}
            )
    output.give(report)
    output.exit_by(report)


def _prepare_torch(seed: int, device: str | None, threads: int | None) -> None:
    """Seed what a file may draw from, so that a command repeats itself; refuse a wrong device."""
    import random

    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002 - the user's code may draw from the old global state
    torch.manual_seed(seed)
    if threads is not None:
        torch.set_num_threads(threads)
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as failure:
        reason = str(failure).strip().splitlines()[0].rstrip(".")
        stop(f"--device {device} cannot be used here: {reason}.")
