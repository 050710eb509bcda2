"""`hessinit initialize`: weights whose curvature fits the learning rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import hessinit
from hessinit.cli import options
from hessinit.cli.failures import NOT_CONVERGED, failures_explained, stop
from hessinit.cli.output import Output, progress
from hessinit.cli.problem_file import find_problem, load_problem, shared_keywords

# What a problem may say to `measure` that means the same here.
SHARED = ("forward", "dropout", "layers", "curvature", "reduction", "check")
TRIAL_STEPS, BATCH_SIZE = 48, 64  # of the race


def _read_rate(text: str | None) -> str | None:
    if text not in (None, "auto"):
        try:
            options.check_rate(float(text or ""))
        except ValueError:
            raise typer.BadParameter(f"{text!r} is no number; give a rate such as 0.1, or auto.") from None
    return text


def initialize(
    problem: options.TrainedProblem,
    lr: Annotated[
        str | None,
        typer.Option(
            callback=_read_rate,
            metavar="X|auto",
            help="The learning rate that the weights shall suit; auto finds one.",
        ),
    ] = None,
    target: Annotated[
        float | None, options.number("The ‖H‖ to aim at, in place of --lr.  [default: 1]")
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
    momentum: Annotated[float | None, options.number("Of momentum and nesterov.  [default: 0.9]")] = None,
    no_race: Annotated[
        bool,
        typer.Option("--no-race", help="Race no candidates: only fit the curvature to --lr, on all data."),
    ] = False,
    trial_steps: Annotated[
        int | None, options.whole("Steps of each candidate, four times as many for auto.  [default: 48]", 3)
    ] = None,
    batch_size: options.BatchSize = None,
    report: Annotated[
        bool, typer.Option("--report", help="Measure every layer before and after, whatever it costs.")
    ] = False,
    layers: options.Layers = None,
    curvature: options.OneCurvature = None,
    tolerance: Annotated[
        float | None, options.number("Relative accuracy of the target.  [default: 0.05]")
    ] = None,
    seed: options.Seed = None,
    device: options.Device = None,
    weights: Annotated[Path | None, options.path("Write the new weights: a .safetensors file.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be written; it needs no --weights.")
    ] = False,
    as_json: options.AsJson = False,
    html: options.AsHtml = None,
    save: options.Save = None,
    picture: options.Picture = None,
) -> None:
    """Find weights whose curvature fits your learning rate.

    With --lr, several candidates are trained for some steps on mini-batches of your data (a race): weights
    whose curvature fits the rate, other schemes and your own weights. The initial weights of the best one are
    the result. Your file stays as it is: with --weights they go into a file that your training loads.

    \b
    Examples:
      hessinit initialize net.py:problem --lr 0.1
      hessinit initialize net.py:problem --lr 0.1 --weights weights.safetensors
      hessinit initialize net.py:problem --lr auto --optimizer adam
      hessinit initialize net.py:problem --lr 0.1 --no-race --report
      hessinit initialize net.py:problem --target 1 --rule layers

    \b
    In your training, before the first step:
      import safetensors.torch
      safetensors.torch.load_model(model, "weights.safetensors")
    or, without any file:
      hessinit.initialize_(model, loss, batch, lr=0.1, data=loader)

    Exit status: 0 done, 1 target not met or no candidate survived, 2 wrong usage, 130 interrupted.
    """
    place = find_problem(problem)
    output = Output(as_json, html, save, picture, weights, reads=place.file)
    if momentum is not None and optimizer not in ("momentum", "nesterov"):
        stop(f"--momentum {momentum:g} is only for --optimizer momentum and nesterov; pass one of them.")
    if weights is not None and dry_run:
        stop("--weights and --dry-run contradict each other: a dry run writes no weights. Leave one out.")
    if weights is not None and weights.suffix != ".safetensors":
        stop(f"--weights {weights} must end in .safetensors.")
    race = lr is not None and not no_race
    if not race and (trial_steps or batch_size):
        race_only = "--trial-steps and --batch-size are for the race"
        stop(f"{race_only}; pass --lr without --no-race, or leave them out.")
    chosen = options.given(
        lr=lr if lr in (None, "auto") else float(lr or 0), target=target, rule=rule, scheme=scheme,
        scaling=scaling, optimizer=optimizer, momentum=momentum, layers=layers,
        curvature=curvature, tolerance=tolerance, seed=seed, dry_run=dry_run, report=report,
        trial_steps=trial_steps,
    )  # fmt: skip
    unfinished = "the initialization was not finished, and nothing was written."
    with (
        failures_explained(f"initializing {problem}", unfinished),
        progress(f"Initializing {problem} …") as on_step,
    ):
        loaded = load_problem(place, seed=seed, device=device)
        keywords, batch = shared_keywords(loaded, SHARED, problem), loaded.batch
        if race:
            batch, data = _cut(loaded.batch, batch_size, trial_steps or TRIAL_STEPS, seed or 0)
            keywords |= {"data": data, "progress": on_step}
        result = hessinit.initialize_(loaded.model, loaded.loss, batch, **{**keywords, **chosen})
    # A race that chose the rate says so itself.
    chosen_rate = lr == "auto" and not race and result.lr is not None
    output.write(result, after=f"learning rate: {result.lr:.3g}" if chosen_rate else None)
    if weights is None:
        how = "Leave out --dry-run and pass" if dry_run else "Pass"
        typer.echo(f"No weights were written. {how} --weights FILE.safetensors to keep them.", err=True)
    if race and not result.converged:
        stop("No candidate survived the race: the result says more.", NOT_CONVERGED)
    if not result.converged and result.scaling != "none":  # left flat on purpose is no failure
        stop("Target not met: the result says why.", NOT_CONVERGED)


def _cut(given: Any, batch_size: int | None, steps: int, seed: int) -> tuple[Any, Any]:
    """A mini-batch to measure, and the data of the race: ready batches, or all examples."""
    from hessinit.training.data import read_data
    from hessinit.training.initialize import LONGER

    data = read_data(given, batch_size or 1, LONGER * steps)
    if not data.ready and batch_size is None:
        data = replace(data, batch_size=min(BATCH_SIZE, data.examples))
    batch = data.initial_batch(seed)
    # An iterator gives its batches only once: they were read.
    parts = [(part.inputs, part.targets) for part in data.parts]
    return (batch.inputs, batch.targets), parts if data.ready else parts[0]
