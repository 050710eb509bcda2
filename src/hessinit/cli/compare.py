"""`hessinit compare`: which start trains the user's network best."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hessinit.cli.comparing import conduct
from hessinit.cli.completing import complete_start
from hessinit.cli.options import (
    AsHtml,
    AsJson,
    BatchSize,
    Device,
    Folder,
    Optimizer,
    Picture,
    RebuiltProblem,
    Save,
    Seeds,
    Steps,
    Warmup,
    WithoutCurvature,
    Workers,
)
from hessinit.cli.output import Output

if TYPE_CHECKING:
    from hessinit.results.comparison import Comparison


def compare(
    problem: RebuiltProblem,
    start: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_start,
            help="default (the weights as they come), a scheme such as he or lsuv, or hessinit; NAME+warmup "
            "lets the rate rise. Repeat it for more.  [default: default, he, glorot, orthogonal, lsuv, "
            "hessinit]",
        ),
    ] = None,
    lr: Annotated[
        list[float] | None,
        typer.Option(
            metavar="X", help="A learning rate; repeat it for more.  [default: 0.003, 0.01, 0.03, 0.1, 0.3]"
        ),
    ] = None,
    seeds: Seeds = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    optimizer: Optimizer = None,
    warmup: Warmup = None,
    no_curvature: WithoutCurvature = False,
    folder: Folder = None,
    workers: Workers = None,
    device: Device = None,
    as_json: AsJson = False,
    html: AsHtml = None,
    save: Save = None,
    picture: Picture = None,
) -> None:
    """Train briefly from several starts, and see which is best.

    Every start is tried at every learning rate with every seed; the same seed gives the same numbers.

    \b
    Examples:
      hessinit compare net.py:problem
      hessinit compare net.py:problem --start he --start lsuv+warmup --lr 0.1
      hessinit compare net.py:problem --folder runs --html comparison.html
      hessinit compare net.py:problem --steps 1000 --picture comparison.png

    \b
    where net.py holds, for example:
      def problem():
          model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 3))
          data = torch.randn(1000, 20), torch.randint(3, (1000,))
          return model, nn.CrossEntropyLoss(), data

    With --folder an interrupted comparison goes on where it was, and more starts, rates and seeds are added
    to those there.

    Exit status: 0 done, 2 wrong usage, 130 interrupted.
    """
    conduct(
        problem,
        _load_verb,
        Output(as_json, html, save, picture),
        schemes=start or None,
        learning_rates=lr or None,
        seeds=seeds,
        steps=steps,
        batch_size=batch_size,
        optimizer=optimizer.value if optimizer else None,
        warmup=warmup,
        curvature_at_start=False if no_curvature else None,
        folder=folder,
        workers=workers,
        device=device,
    )


def _load_verb(given: dict[str, Any]) -> Callable[..., Comparison]:
    from hessinit.training.compare import DEFAULT_SCHEMES, LEARNING_RATES, read_positive_numbers
    from hessinit.training.compare import compare as verb
    from hessinit.training.initializers import read_schemes

    read_positive_numbers("learning_rates", given.get("learning_rates", LEARNING_RATES), "[0.01, 0.1]")
    read_schemes(given.get("schemes", DEFAULT_SCHEMES), 1)
    return verb
