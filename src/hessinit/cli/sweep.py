"""`hessinit sweep`: how the size of the first weights sets the curvature, and what becomes of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hessinit.cli.comparing import conduct
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


def sweep(
    problem: RebuiltProblem,
    std: Annotated[
        list[float] | None,
        typer.Option(
            metavar="X",
            help="A standard deviation of the weights; repeat it for more.  "
            "[default: 1, 0.5, 0.1, 0.075, 0.05, 0.005]",
        ),
    ] = None,
    lr: Annotated[float | None, typer.Option(metavar="X", help="The learning rate.  [default: 0.01]")] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Draw only these weights: a layer's name or a pattern like 'conv*'; repeat it for more.",
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
    """Draw weights of several sizes; see ‖H‖ and the loss of each.

    The paper's experiment: weights from N(0, std²), biases 0, the curvature of each layer, a short training.

    \b
    Examples:
      hessinit sweep net.py:problem
      hessinit sweep net.py:problem --std 0.1 --std 0.05 --lr 0.1
      hessinit sweep net.py:problem --layers 'conv*' --picture sweep.png

    The function is as for hessinit compare.

    Exit status: 0 done, 2 wrong usage, 130 interrupted.
    """
    conduct(
        problem,
        _load_verb,
        Output(as_json, html, save, picture),
        stds=std or None,
        learning_rate=lr,
        layers=layers or None,
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
    from hessinit.training.compare import STDS, read_positive_numbers
    from hessinit.training.compare import sweep as verb
    from hessinit.training.loop import read_positive

    read_positive_numbers("stds", given.get("stds", STDS), "[0.5, 0.05]")
    read_positive("learning_rate", given.get("learning_rate", 0.01))
    return verb
