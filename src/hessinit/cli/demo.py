"""`hessinit demo`: a small network on the embedded digits."""

from __future__ import annotations

from typing import Annotated

import typer

from hessinit.cli.failures import failures_explained
from hessinit.cli.options import LARGEST_SEED, AsHtml, AsJson, Diagnostics, Jacobians
from hessinit.cli.output import Output, print_text
from hessinit.cli.progress import working

INTRODUCTION = """\
A LeNet (sigmoids, PyTorch's default weights), measured on 256 real handwritten digits.
‖H‖ is how sharply the loss bends with a layer's weights; gap is exact over Gauss-Newton ‖H‖.
"""

NEXT_STEPS = """
Next, your own network. Write net.py:

    def problem():
        ...
        return model, loss, (inputs, targets)

and run: hessinit measure net.py:problem"""


def demo(
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, metavar="N", help="Seed of the initial weights.")
    ] = 0,
    jacobians: Jacobians = False,
    diagnostics: Diagnostics = False,
    as_json: AsJson = False,
    html: AsHtml = None,
) -> None:
    """Measure a small network on the embedded digits.

    \b
    Examples:
      hessinit demo
      hessinit demo --seed 1 --html demo.html
      hessinit demo --jacobians --diagnostics
    """
    output = Output(as_json, html)
    output.check()
    with failures_explained("the demo"), working("Measuring a small network on 256 digits …"):
        import torch

        from hessinit.demo import problem
        from hessinit.measuring import measure as measure_curvature

        # So small a network gains nothing from threads, and on a busy machine they wait for each other.
        torch.set_num_threads(1)
        report = measure_curvature(
            *problem(seed), curvature="both", seed=seed, jacobians=jacobians, diagnostics=diagnostics
        )
    if not as_json:
        print_text(INTRODUCTION)
    output.give(report)
    if not as_json:
        print_text(NEXT_STEPS)
    output.exit_by(report)
