"""The options that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

LARGEST_SEED = 2**32 - 1  # of numpy; torch would take more


class Curvature(str, Enum):
    """What --curvature can be."""

    GAUSS_NEWTON = "gauss-newton"
    HESSIAN = "hessian"
    BOTH = "both"


class TrainedBy(str, Enum):
    """What --optimizer can be."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"


AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")]
AsHtml = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Also write the report as a web page.")
]
Problem = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="A function without arguments that returns model, loss, data: (inputs, targets) with all "
        "examples, or a list of batches; it is called again for every new model. It may add a dict with a "
        "forward, as for hessinit measure. Also as package.module:function.",
        show_default=False,
    ),
]
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
    typer.Option(metavar="DIR", help="Keep every finished run there; the same command goes on from them."),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="How many processes.  [default: one for each core]"),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="Train there: cpu, cuda, cuda:1, mps …")
]
Save = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", help="Also save everything, for `hessinit show`.")
]
Picture = Annotated[
    Path | None,
    typer.Option("--picture", metavar="FILE", help="Also draw it: a .png, .pdf or .svg file."),
]
Jacobians = Annotated[
    bool, typer.Option("--jacobians", help="Also the Jacobian products around each layer, and bounds.")
]
Diagnostics = Annotated[
    bool, typer.Option("--diagnostics", help="Also activations, gradients, dead and saturated units.")
]
