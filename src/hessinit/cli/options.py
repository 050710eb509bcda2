"""The options that several commands share: one name, one metavar, one help text for one meaning."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from hessinit.cli.completing import complete_device, complete_problem

LARGEST_SEED = 2**32 - 1  # of numpy; torch would take more
PROBLEM = "FILE.py:FUNCTION"
UNREAD_HOME = (
    "would go to a folder called ~, for shells read ~ as your home only where a word begins: put a space in "
    "place of the equals sign, and no quotes."
)


class Curvature(str, Enum):
    """What --curvature of a measurement can be."""

    GAUSS_NEWTON = "gauss-newton"
    HESSIAN = "hessian"
    BOTH = "both"


class OneCurvature(str, Enum):
    """What --curvature can be where one number is followed."""

    GAUSS_NEWTON = "gauss-newton"
    HESSIAN = "hessian"


class TrainedBy(str, Enum):
    """What --optimizer of a training can be."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"


def _check_tolerance(tolerance: float | None) -> float | None:
    if tolerance is not None and not tolerance > 0:
        raise typer.BadParameter(f"{tolerance} is not positive; give a relative accuracy such as 1e-3.")
    return tolerance


def check_rate(lr: float | None) -> float | None:
    """Refuse a learning rate that no step can have."""
    if lr is not None and not 0 < lr < float("inf"):
        raise typer.BadParameter(f"{lr} must be a number above 0, such as 0.1.")
    return lr


def is_unread_home(path: Path) -> bool:
    """Whether the shell left ~ in it, as bash does in --save=~/x; a folder that is called so may be there."""
    return path.parts[:1] == ("~",) and not Path("~").exists()


def read_folder(text: str) -> Path:
    """A folder's name; an empty one, as of a variable that is not set, would be the working folder."""
    if not text:
        raise typer.BadParameter("it is empty; give a folder, such as results, or . for this one.")
    if is_unread_home(Path(text)):
        raise typer.BadParameter(f"{text} {UNREAD_HOME}")
    return Path(text)


# The problem.
Problem = Annotated[
    str,
    typer.Argument(
        metavar=PROBLEM,
        help="A function without arguments that returns model, loss, batch, and, if needed, a dict of "
        "keyword arguments for hessinit.measure, such as forward. Also as package.module:function.",
        show_default=False,
        autocompletion=complete_problem,
    ),
]
RebuiltProblem = Annotated[
    str,
    typer.Argument(
        metavar=PROBLEM,
        help="A function without arguments that returns model, loss, data: (inputs, targets) with all "
        "examples, or a list of batches; it is called again for every new model. It may add a dict with a "
        "forward, as for hessinit measure. Also as package.module:function.",
        show_default=False,
        autocompletion=complete_problem,
    ),
]
TrainedProblem = Annotated[
    str,
    typer.Argument(
        metavar=PROBLEM,
        help="A function without arguments that returns model, loss, data: (inputs, targets) with all "
        "examples, or a list of batches. It may add a dict with a forward, as for hessinit measure. Also as "
        "package.module:function.",
        show_default=False,
        autocompletion=complete_problem,
    ),
]
Layers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A layer's name, or a pattern like 'conv*'; '**' has biases, too. Repeat for more.",
    ),
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
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Where to compute: cpu, cuda, cuda:1, mps …",
        autocompletion=complete_device,
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, metavar="N", help="How many CPU threads torch may use.")]

# What is printed and written.
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
AsHtml = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Also write the result as a web page.")
]
Save = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", help="Also save everything, for `hessinit show`.")
]
Picture = Annotated[
    Path | None,
    typer.Option("--picture", metavar="FILE", help="Also draw it: a .png, .pdf or .svg file."),
]

# What else is measured.
Jacobians = Annotated[
    bool, typer.Option("--jacobians", help="Also the Jacobian products around each layer, and bounds.")
]
Diagnostics = Annotated[
    bool, typer.Option("--diagnostics", help="Also activations, gradients, dead and saturated units.")
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
    int | None,
    typer.Option(min=1, metavar="N", help="Steps over which the rate rises linearly."),
]
WithoutCurvature = Annotated[bool, typer.Option("--no-curvature", help="Do not measure ‖H‖ at the start.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        parser=read_folder,
        metavar="DIR",
        help="Keep every finished run there; the same command goes on from them.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="How many processes.  [default: one for each core]"),
]
