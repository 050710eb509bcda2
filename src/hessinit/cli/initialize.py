"""`hessinit initialize`: weights whose curvature fits the learning rate."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hessinit.cli.completing import complete_scheme
from hessinit.cli.failures import NOT_CONVERGED, failures_explained, stop
from hessinit.cli.interrupts import interruption_explained
from hessinit.cli.loading import load_ready, take_shared
from hessinit.cli.options import (
    AsHtml,
    AsJson,
    Device,
    Layers,
    OneCurvature,
    Picture,
    Problem,
    Save,
    Seed,
    Threads,
    check_rate,
)
from hessinit.cli.output import Output
from hessinit.cli.progress import working
from hessinit.cli.wording import in_words_of
from hessinit.problem_file import file_read_for, find_problem

if TYPE_CHECKING:
    from hessinit.results.initialization import Initialization

# What a problem may say to `measure` that means the same here.
SHARED = ("forward", "dropout", "layers", "curvature", "reduction", "check")


class Rule(str, Enum):
    """What --rule can be."""

    NETWORK = "network"
    LAYERS = "layers"


class Scaling(str, Enum):
    """What --scaling can be."""

    AUTO = "auto"
    ALL = "all"
    LAST = "last"
    SMALL_OUTPUT = "small-output"


class SteppedBy(str, Enum):
    """What --optimizer can be: which steps the curvature must fit."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    NESTEROV = "nesterov"
    ADAM = "adam"
    ADAMW = "adamw"


def _read_rate(text: str | None) -> str | None:
    if text in (None, "auto"):
        return text
    try:
        check_rate(float(text or ""))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number; give a rate such as 0.1, or auto.") from None
    return text


def initialize(
    problem: Problem,
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
        Rule | None,
        typer.Option(help="The target is for the whole network, or for every layer.  [default: network]"),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_scheme,
            help="The start before scaling: a scheme such as he or lsuv, keep for the weights as they come, "
            "or auto.  [default: auto]",
        ),
    ] = None,
    scaling: Annotated[
        Scaling | None, typer.Option(help="Which weights are scaled to meet the target.  [default: auto]")
    ] = None,
    optimizer: Annotated[
        SteppedBy | None, typer.Option(help="Whose steps the curvature must fit.  [default: sgd]")
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(metavar="X", help="Of momentum and nesterov.  [default: 0.9]")
    ] = None,
    layers: Layers = None,
    curvature: Annotated[
        OneCurvature | None, typer.Option(help="Which second derivative.  [default: gauss-newton]")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(metavar="X", help="How near the target is met.  [default: 0.05]")
    ] = None,
    seed: Seed = None,
    device: Device = None,
    threads: Threads = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="FILE", help="Write the new weights: a .safetensors file."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be written; it needs no --weights.")
    ] = False,
    as_json: AsJson = False,
    html: AsHtml = None,
    save: Save = None,
    picture: Picture = None,
) -> None:
    """Find weights whose curvature fits your learning rate.

    Prints ‖H‖ before and after, and how every weight was scaled. Your file stays as it is: with --weights the
    new weights go into a file that your training loads.

    \b
    Examples:
      hessinit initialize net.py:problem --lr 0.1
      hessinit initialize net.py:problem --lr 0.1 --weights start.safetensors
      hessinit initialize net.py:problem --lr auto --optimizer momentum
      hessinit initialize net.py:problem --target 1 --rule layers

    \b
    In your training, before the first step:
      import safetensors.torch
      safetensors.torch.load_model(model, "start.safetensors")
    or, without any file:
      hessinit.initialize_(model, loss, batch, lr=0.1)

    Exit status: 0 done, 1 target not met, 2 wrong usage, 130 interrupted.
    """
    output = Output(as_json, html, save, picture)
    output.check(reads=file_read_for(problem), more={"--weights": weights})
    _check_weights(weights, dry_run)
    options: dict[str, Any] = {
        "lr": lr if lr in (None, "auto") else float(lr or 0),
        "target": target,
        "rule": rule.value if rule else None,
        "scheme": scheme,
        "scaling": scaling.value if scaling else None,
        "optimizer": optimizer.value if optimizer else None,
        "momentum": momentum,
        "layers": layers or None,
        "curvature": curvature.value if curvature else None,
        "tolerance": tolerance,
        "seed": seed,
        "dry_run": dry_run or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with (
        interruption_explained("the initialization"),
        failures_explained(problem, "initializing"),
        in_words_of({name: f"--{name}" for name in options if name in given or name not in SHARED}),
    ):
        place = find_problem(problem)
        with working(f"Initializing {problem} …"):
            from hessinit.init.initialize import initialize_

            _check_early(given)
            loaded = load_ready(place, seed=seed, device=device, threads=threads)
            keywords = take_shared(loaded, SHARED, problem)
            result = initialize_(loaded.model, loaded.loss, loaded.batch, **{**keywords, **given})
    output.give(result, also={} if weights is None else {weights: result.save_weights})
    if weights is None:
        how = "Leave out --dry-run and pass" if dry_run else "Pass"
        typer.echo(f"No weights were written. {how} --weights FILE.safetensors to keep them.", err=True)
    _exit_by(result)


def _check_early(given: dict[str, Any]) -> None:
    """What can be judged without the user's file is judged before it is run, which may take a while."""
    from hessinit.init.defaults import read_config

    checked = ("lr", "target", "optimizer", "momentum", "rule", "scheme", "scaling", "curvature", "tolerance")
    read_config(**{name: given[name] for name in checked if name in given})


def _check_weights(weights: Path | None, dry_run: bool) -> None:
    if weights is None:
        return
    if dry_run:
        stop("--weights and --dry-run do not go together: a dry run writes no weights. Leave one out.")
    if weights.suffix != ".safetensors":
        stop(
            f"--weights {weights} must end in .safetensors; "
            f"that is how they are written, such as {weights.stem or 'start'}.safetensors."
        )


def _exit_by(result: Initialization) -> None:
    """End with status 1 where the library would warn; a start left gentle on purpose is no failure."""
    from hessinit.init.defaults import NOT_SCALED

    if not result.converged and result.scaling != NOT_SCALED:
        stop("Target not met: the result says why.", NOT_CONVERGED)
