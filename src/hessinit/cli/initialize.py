"""`hessinit initialize`: weights whose curvature fits the learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import hessinit
from hessinit.cli import options
from hessinit.cli.failures import NOT_CONVERGED, failures_explained, stop
from hessinit.cli.output import Output, progress
from hessinit.cli.problem_file import find_problem, load_problem, shared_keywords

# What a problem may say to `measure` that means the same here.
SHARED = ("forward", "dropout", "layers", "curvature", "reduction", "check")


def _read_rate(text: str | None) -> str | None:
    if text not in (None, "auto"):
        try:
            options.check_rate(float(text or ""))
        except ValueError:
            raise typer.BadParameter(f"{text!r} is no number; give a rate such as 0.1, or auto.") from None
    return text


def initialize(
    problem: options.Problem,
    lr: Annotated[
        str | None,
        typer.Option(
            callback=_read_rate,
            metavar="X|auto",
            help="The learning rate that the weights shall suit; auto finds one.",
        ),
    ] = None,
    target: Annotated[
        float | None, typer.Option(metavar="X", help="The ‖H‖ to aim at, in place of --lr.  [default: 1]")
    ] = None,
    rule: Annotated[
        Literal["network", "layers"] | None,
        typer.Option(help="The target is for the whole network, or for every layer.  [default: network]"),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The initialization before scaling: a scheme such as he or lsuv, keep for the weights as "
            "they come, or auto.  [default: auto]",
        ),
    ] = None,
    scaling: Annotated[
        Literal["auto", "all", "last", "small-output"] | None,
        typer.Option(help="Which weights are scaled to meet the target.  [default: auto]"),
    ] = None,
    optimizer: Annotated[
        Literal["sgd", "momentum", "nesterov", "adam", "adamw"] | None,
        typer.Option(help="Whose steps the curvature must fit.  [default: sgd]"),
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(metavar="X", help="Of momentum and nesterov.  [default: 0.9]")
    ] = None,
    layers: options.Layers = None,
    curvature: options.OneCurvature = None,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="X", help="Relative accuracy of the target.  [default: 0.05]"),
    ] = None,
    seed: options.Seed = None,
    device: options.Device = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="FILE", help="Write the new weights: a .safetensors file."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be written; it needs no --weights.")
    ] = False,
    as_json: options.AsJson = False,
    html: options.AsHtml = None,
    save: options.Save = None,
    picture: options.Picture = None,
) -> None:
    """Find weights whose curvature fits your learning rate.

    Prints ‖H‖ before and after, and how every weight was scaled. Your file stays as it is: with --weights the
    new weights go into a file that your training loads.

    \b
    Examples:
      hessinit initialize net.py:problem --lr 0.1
      hessinit initialize net.py:problem --lr 0.1 --weights weights.safetensors
      hessinit initialize net.py:problem --lr auto --optimizer momentum
      hessinit initialize net.py:problem --target 1 --rule layers

    \b
    In your training, before the first step:
      import safetensors.torch
      safetensors.torch.load_model(model, "weights.safetensors")
    or, without any file:
      hessinit.initialize_(model, loss, batch, lr=0.1)

    Exit status: 0 done, 1 target not met, 2 wrong usage, 130 interrupted.
    """
    place = find_problem(problem)
    output = Output(as_json, html, save, picture, weights)
    output.check(reads=place.file)
    if momentum is not None and optimizer not in ("momentum", "nesterov"):
        stop(f"--momentum {momentum:g} is only for --optimizer momentum and nesterov; pass one of them.")
    if weights is not None and dry_run:
        stop("--weights and --dry-run contradict each other: a dry run writes no weights. Leave one out.")
    if weights is not None and weights.suffix != ".safetensors":
        stop(f"--weights {weights} must end in .safetensors.")
    chosen = options.given(
        lr=lr if lr in (None, "auto") else float(lr or 0), target=target, rule=rule, scheme=scheme,
        scaling=scaling, optimizer=optimizer, momentum=momentum, layers=layers,
        curvature=curvature, tolerance=tolerance, seed=seed, dry_run=dry_run,
    )  # fmt: skip
    unfinished = "the initialization was not finished, and nothing was written."
    with failures_explained(f"initializing {problem}", unfinished), progress(f"Initializing {problem} …"):
        loaded = load_problem(place, seed=seed, device=device)
        keywords = shared_keywords(loaded, SHARED, problem)
        result = hessinit.initialize_(loaded.model, loaded.loss, loaded.batch, **{**keywords, **chosen})
    output.write(result)
    if weights is None:
        how = "Leave out --dry-run and pass" if dry_run else "Pass"
        typer.echo(f"No weights were written. {how} --weights FILE.safetensors to keep them.", err=True)
    if not result.converged and result.scaling != "none":  # left flat on purpose is no failure
        stop("Target not met: the result says why.", NOT_CONVERGED)
