"""The options that several commands share: one name, one metavar, one help text for one meaning."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

Item = TypeVar("Item")

LARGEST_SEED = 2**32 - 1  # of numpy; torch would take more
PROBLEM = "FILE.py:FUNCTION"


class Curvature(str, Enum):
    """What --curvature of a measurement can be."""

    GAUSS_NEWTON = "gauss-newton"
    HESSIAN = "hessian"
    BOTH = "both"


class OneCurvature(str, Enum):
    """What --curvature can be where one number is used."""

    GAUSS_NEWTON = "gauss-newton"
    HESSIAN = "hessian"


class TrainedBy(str, Enum):
    """What --optimizer of a training can be."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"


def given(**options: Any) -> dict[str, Any]:
    """The options that were given, enums as their values.

    >>> given(steps=10, layers=None, curvature=Curvature.BOTH)
    {'steps': 10, 'curvature': 'both'}
    """
    return {
        name: value.value if isinstance(value, Enum) else value
        for name, value in options.items()
        if value is not None
    }


def split(values: list[str] | None, read: Callable[[str], Item]) -> list[Item] | None:
    """The items of a list option: separated by commas, given once or several times; None without any."""
    items = [item.strip() for value in values or () for item in value.split(",")]
    try:
        return [read(item) for item in items] or None
    except ValueError:
        raise typer.BadParameter(f"{','.join(items)!r} must be numbers separated by commas.") from None


def check_rate(lr: float | None) -> float | None:
    """Refuse a learning rate that no step can have."""
    if lr is not None and not 0 < lr < float("inf"):
        raise typer.BadParameter(f"{lr} must be a number above 0, such as 0.1.")
    return lr


def read_folder(text: str) -> Path:
    """A folder's name; an empty one, as of a variable that is not set, would be the working folder."""
    if not text:
        raise typer.BadParameter("it is empty; give a folder, such as results, or . for this one.")
    return Path(text)


def _check_tolerance(tolerance: float | None) -> float | None:
    if tolerance is not None and not tolerance > 0:
        raise typer.BadParameter(f"{tolerance} is not positive; give a relative accuracy such as 1e-3.")
    return tolerance


def _problem(returns: str) -> Any:
    return typer.Argument(
        metavar=PROBLEM,
        help=f"A function without arguments that returns {returns} It may add a dict of keyword arguments "
        "for hessinit.measure, such as forward. Also as package.module:function.",
        show_default=False,
    )


# The problem.
Problem = Annotated[str, _problem("model, loss, batch.")]
TrainedProblem = Annotated[
    str, _problem("model, loss, data: (inputs, targets) with all examples, or a list of batches.")
]
Layers = Annotated[
    list[str] | None,
    typer.Option(metavar="NAMES", help="Layers by name or pattern, as fc1,'conv*'; '**' adds biases."),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        callback=_check_tolerance, metavar="X", help="Relative accuracy of the norms.  [default: 0.001]"
    ),
]

# How it is computed.
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=LARGEST_SEED,
        metavar="N",
        help="Seeds random, numpy and torch before the file is run.  [default: 0]",
    ),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="Where to compute: cpu, cuda, cuda:1 …")
]
Threads = Annotated[int | None, typer.Option(min=1, metavar="N", help="How many CPU threads torch may use.")]
Which = Annotated[OneCurvature | None, typer.Option(help="Which second derivative.  [default: gauss-newton]")]

# What is printed and written.
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
AsHtml = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Also write the result as a web page.")
]
Save = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", help="Also save everything, for `hessinit show`.")
]
Picture = Annotated[
    Path | None, typer.Option("--picture", metavar="FILE", help="Also draw it: a .png, .pdf or .svg file.")
]

# Training.
Seeds = Annotated[int | None, typer.Option(min=1, metavar="N", help="How many seeds for each.  [default: 3]")]
Steps = Annotated[
    int | None, typer.Option(min=10, metavar="N", help="Training steps of each run.  [default: 200]")
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Examples in a mini-batch.  [default: 64]")
]
Optimizer = Annotated[
    TrainedBy | None, typer.Option(help="Plain SGD, with momentum 0.9, or Adam.  [default: sgd]")
]
Warmup = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Steps over which the learning rate rises linearly.")
]
WithoutCurvature = Annotated[bool, typer.Option("--no-curvature", help="Do not measure ‖H‖ before training.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        parser=read_folder,
        metavar="DIR",
        help="Keep every finished run there; the same command goes on from them.",
    ),
]
Workers = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="How many processes.  [default: one for each core]")
]
