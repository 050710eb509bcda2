"""The options that several commands share: one name, one metavar, one help text for one meaning."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from hessinit.errors import did_you_mean

LARGEST_SEED = 2**32 - 1  # of numpy; torch would take more
PROBLEM = "FILE.py:FUNCTION"
# Those of torch.optim that `hessinit.Training` takes by name, and two with a momentum of 0.9.
OPTIMIZERS = (
    *("sgd", "momentum", "nesterov", "adam", "adamw", "nadam", "radam", "rmsprop", "adagrad"),
    *("adadelta", "adamax", "adafactor", "asgd", "rprop"),
)
REFUSED = ("lbfgs", "muon", "sparseadam")  # by the library, which says the way out


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given: the library has the defaults of the others.

    >>> given(steps=10, layers=None, jacobians=False)
    {'steps': 10}
    """
    return {
        name: value for name, value in options.items() if value is not None and value is not False
    }


def read_names(values: list[str] | None) -> list[str] | None:
    """Return the items of a list option: separated by commas, given once or several times.

    >>> read_names(["fc1, fc2", "head"])
    ['fc1', 'fc2', 'head']
    """
    return [item.strip() for value in values or () for item in value.split(",")] or None


def read_numbers(values: list[str] | None) -> list[float] | None:
    items = read_names(values) or []
    try:
        return [float(item) for item in items] or None
    except ValueError:
        raise typer.BadParameter(
            f"{','.join(items)!r} must be numbers separated by commas."
        ) from None


def read_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number; give one, such as 0.1.") from None


def check_rate(lr: float | None) -> float | None:
    if lr is not None and not 0 < lr < float("inf"):
        raise typer.BadParameter(f"{lr} must be a number above 0, such as 0.1.")
    return lr


def check_optimizer(text: str | None) -> str | None:
    if text is None or text.lower() in (*OPTIMIZERS, *REFUSED) or ":" in text:
        return text
    listed = ", ".join(OPTIMIZERS)
    raise typer.BadParameter(
        f"{text!r} is unknown; choose from {listed}, or give a function that builds one, as "
        "net.py:optimizer."
        f"{did_you_mean(text.lower(), [*OPTIMIZERS])}"
    )


def _problem(returns: str) -> Any:
    help = (
        f"A function without arguments that returns {returns} It may add a dict: optimizer, and "
        "keyword arguments for hessinit.measure, such as forward. Also as package.module:function."
    )
    return typer.Argument(metavar=PROBLEM, help=help, show_default=False)


def names(help: str) -> Any:
    return typer.Option(callback=read_names, metavar="NAMES", help=help)


def numbers(help: str) -> Any:
    return typer.Option(callback=read_numbers, metavar="X,…", help=help)


def number(help: str) -> Any:
    return typer.Option(parser=read_number, metavar="X", help=help)


def rate(help: str, show_default: bool = True) -> Any:
    return typer.Option(
        parser=read_number, callback=check_rate, metavar="X", help=help, show_default=show_default
    )


def whole(help: str, least: int = 1, most: int | None = None) -> Any:
    return typer.Option(min=least, max=most, metavar="N", help=help)


def path(help: str, metavar: str = "FILE") -> Any:
    return typer.Option(metavar=metavar, help=help)


# The problem.
Problem = Annotated[str, _problem("model, loss, batch.")]
TrainedProblem = Annotated[
    str, _problem("model, loss, data: (inputs, targets) with all examples, or a list of batches.")
]
Layers = Annotated[
    list[str] | None, names("Layers by name or pattern, as fc1,'conv*'; '**' adds biases.")
]
Tolerance = Annotated[float | None, number("Relative accuracy.  [default: 0.001]")]
OneCurvature = Annotated[
    Literal["gauss-newton", "hessian"] | None,
    typer.Option(help="Which second derivative.  [default: gauss-newton]"),
]

# How it is computed.
Seed = Annotated[
    int | None,
    whole("Seeds random, numpy and torch before the file is run.  [default: 0]", 0, LARGEST_SEED),
]
Device = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="Where to compute: cpu, cuda, cuda:1 …")
]

# What is written.
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Also draw what is trainable in a model that has frozen weights or adapters.",
    ),
]

# What is printed and written.
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
AsHtml = Annotated[Path | None, path("Also write the result as a web page.")]
Save = Annotated[Path | None, path("Also save everything, for `hessinit show`.")]
Picture = Annotated[Path | None, path("Also draw it: a .png, .pdf or .svg file.")]

# Training.
TrainingSteps = Annotated[
    int | None, whole("Steps of your training: a longer one gets longer trials.  [default: 1000]")
]
BatchSize = Annotated[int | None, whole("Examples in a mini-batch.  [default: 64]")]
OPTIMIZER_HELP = (
    f"{', '.join(OPTIMIZERS)}, or FILE.py:FUNCTION: a function of the parameters (and the rate) "
    "that builds any optimizer, or a list of them; also as package.module:Class.  [default: the "
    "problem's, or sgd]"
)
Optimizer = Annotated[
    str | None, typer.Option(callback=check_optimizer, metavar="NAME", help=OPTIMIZER_HELP)
]
ClipNorm = Annotated[
    float | None,
    typer.Option(
        parser=read_number,
        callback=check_rate,
        metavar="X",
        help="Your training clips gradients to this length, all of them together.",
    ),
]
Warmup = Annotated[int | None, whole("Steps over which the learning rate rises linearly.")]


@dataclass(frozen=True)
class ComputeOptions:
    """How it is computed."""

    seed: Seed = None
    device: Device = None


@dataclass(frozen=True)
class ResultOptions:
    """What is printed and written."""

    as_json: AsJson = False
    html: AsHtml = None
    save: Save = None
    picture: Picture = None


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of its dataclass arguments as options of their own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        group = groups[parameter.name]
        group_hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            hint = group_hints[field.name]
            parameters.append(
                parameter.replace(name=field.name, annotation=hint, default=field.default)
            )

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        for name, group in groups.items():
            values = [arguments.pop(field.name) for field in fields(group)]
            arguments[name] = group(*values)
        command(**arguments)

    keyword_only = inspect.Parameter.KEYWORD_ONLY
    parameters = [parameter.replace(kind=keyword_only) for parameter in parameters]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
