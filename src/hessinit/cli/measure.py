"""`hessinit measure`: the user's own network."""

from __future__ import annotations

from typing import Annotated

import typer

from hessinit.cli.failures import failures_explained
from hessinit.cli.interrupts import interruption_explained
from hessinit.cli.loading import load_ready
from hessinit.cli.options import (
    AsHtml,
    AsJson,
    Curvature,
    Device,
    Diagnostics,
    Jacobians,
    Layers,
    Picture,
    Problem,
    Save,
    Seed,
    Threads,
    Tolerance,
    check_rate,
)
from hessinit.cli.output import Output
from hessinit.cli.progress import working
from hessinit.cli.rates import judge_rate
from hessinit.cli.wording import in_words_of
from hessinit.problem_file import file_read_for, find_problem


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
    jacobians: Jacobians = False,
    diagnostics: Diagnostics = False,
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
    output.check(reads=file_read_for(problem))
    options = {
        "curvature": curvature.value if curvature else None,
        "layers": layers or None,
        "tolerance": tolerance,
        "seed": seed,
        "jacobians": jacobians or None,
        "diagnostics": diagnostics or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with (
        interruption_explained("the measurement"),
        failures_explained(problem),
        in_words_of({name: f"--{name}" for name in given}),
    ):
        place = find_problem(problem)
        with working(f"Measuring {problem} …"):
            from hessinit.measurement.measure import measure as measure_curvature

            loaded = load_ready(place, seed=seed, device=device, threads=threads)
            report = measure_curvature(
                loaded.model, loaded.loss, loaded.batch, **{**loaded.keywords, **given}
            )
    output.give(report, after=None if lr is None else judge_rate(report, lr, problem))
    output.exit_by(report)
