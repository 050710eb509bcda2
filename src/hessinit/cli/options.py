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


AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")]
AsHtml = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Also write the report as a web page.")
]
Jacobians = Annotated[
    bool, typer.Option("--jacobians", help="Also the Jacobian products around each layer, and bounds.")
]
Diagnostics = Annotated[
    bool, typer.Option("--diagnostics", help="Also activations, gradients, dead and saturated units.")
]
