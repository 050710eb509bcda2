"""`hessinit track`: train the user's network for a while, and follow its curvature."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hessinit.cli.failures import failures_explained
from hessinit.cli.interrupts import INTERRUPTED, ended_gently
from hessinit.cli.loading import load_ready, name_unused
from hessinit.cli.options import (
    AsHtml,
    AsJson,
    BatchSize,
    Device,
    Layers,
    OneCurvature,
    Optimizer,
    Picture,
    Save,
    Seed,
    Threads,
    TrainedProblem,
    Warmup,
    check_rate,
)
from hessinit.cli.output import Output, check_writable, print_report, print_text
from hessinit.cli.progress import working
from hessinit.cli.tailing import LastPoint
from hessinit.cli.wording import in_words_of
from hessinit.problem_file import LoadedProblem, find_problem

if TYPE_CHECKING:
    from hessinit.report.initialization import Initialization
    from hessinit.report.tracking import Tracking

STEPS = 200
# What a problem may say to `measure` that means the same here.
SHARED = ("forward", "layers", "curvature")
EXAMPLES_TO_INITIALIZE = 256  # as many as the curvature is tracked on

# The library's arguments, as they are called here.
OPTIONS = {
    "lr": "--lr",
    "batch_size": "--batch-size",
    "each_layer": "--each-layer",
    "path": "--log",
    **{name: f"--{name}" for name in ("steps", "every", "share", "warmup", "optimizer", "seed")},
    **{name: f"--{name}" for name in ("layers", "curvature")},
}


def track(
    problem: TrainedProblem,
    lr: Annotated[
        float, typer.Option(callback=check_rate, metavar="X", help="The learning rate.", show_default=False)
    ],
    steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="Training steps.  [default: 200]", show_default=False)
    ] = STEPS,
    every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Measure every so many steps.  [default: 10]")
    ] = None,
    optimizer: Optimizer = None,
    batch_size: BatchSize = None,
    warmup: Warmup = None,
    initialize: Annotated[
        bool, typer.Option("--initialize", help="First give it weights whose curvature fits the rate.")
    ] = False,
    each_layer: Annotated[
        bool, typer.Option("--each-layer", help="Follow every layer, not only the network.")
    ] = False,
    share: Annotated[
        float | None,
        typer.Option(metavar="X", help="The most of the time that measuring may take.  [default: 0.5]"),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            metavar="FILE",
            help="Write every point there at once, as a line of JSON; a file that is there is kept, and the "
            "next free name taken.",
        ),
    ] = None,
    layers: Layers = None,
    curvature: Annotated[
        OneCurvature | None, typer.Option(help="Which second derivative.  [default: gauss-newton]")
    ] = None,
    seed: Seed = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
    html: AsHtml = None,
    save: Save = None,
    picture: Picture = None,
) -> None:
    """Train for a while, and follow ‖H‖ and the edge of stability.

    The loss, lr·‖H‖ and how near the rate is to what the optimizer can stand, every so many steps. Ctrl-C
    ends the training and shows what there is until then.

    \b
    Examples:
      hessinit track net.py:problem --lr 0.1
      hessinit track net.py:problem --lr 0.1 --initialize --html track.html
      hessinit track net.py:problem --lr 0.01 --optimizer adam --steps 1000 --every 50
      hessinit track net.py:problem --lr 0.1 --each-layer --log curvature.jsonl

    The function is as for hessinit compare. In a training loop of your own, use hessinit.track.

    Exit status: 0 done, 2 wrong usage, 130 interrupted.
    """
    output = Output(as_json, html, save, picture)
    output.check()
    if log is not None:
        check_writable("--log", log)
    options = {
        "lr": lr,
        "steps": steps,
        "every": every,
        "optimizer": optimizer.value if optimizer else None,
        "batch_size": batch_size,
        "warmup": warmup,
        "each_layer": each_layer or None,
        "share": share,
        "layers": layers or None,
        "curvature": curvature.value if curvature else None,
        "seed": seed,
        "name": problem,
    }
    given = {name: value for name, value in options.items() if value is not None}
    started: Initialization | None = None
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        lines = Path(folder, "lines.jsonl") if log is None else free_name(log)
        stack.enter_context(ended_gently())
        try:
            with (
                failures_explained(problem, "tracking"),
                in_words_of({name: OPTIONS[name] for name in OPTIONS if name in given or name not in SHARED}),
            ):
                place = find_problem(problem)
                with working(f"Loading {problem} …"):
                    loaded = load_ready(place, seed=seed, device=device, threads=threads)
                    keywords = _shared_keywords(problem, loaded)
                    data = loaded.batch
                    if initialize:
                        started, data = _initialize(loaded, {**keywords, **given})
                tracking = _train(loaded, data, lines, {**keywords, **given})
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
            tracking = _read_back(lines)
    if started is not None and not as_json:
        print_report(started)
        print_text("")
    output.give(replace(tracking, initialization=started))
    if log is not None:
        typer.echo(f"Wrote {lines}{'' if lines == log else f', for {log} was there'}.", err=True)
    if interrupted:
        typer.echo(f"Interrupted: stopped after {_steps_of(tracking)} of {steps} steps.", err=True)
        raise typer.Exit(INTERRUPTED)


def free_name(path: Path) -> Path:
    """The name itself or, where it is taken, the next free one: curvature-2.jsonl."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def _shared_keywords(problem: str, loaded: LoadedProblem) -> dict[str, Any]:
    taken = {name: value for name, value in loaded.keywords.items() if name in SHARED}
    if taken.get("curvature") == "both":
        del taken["curvature"]
    name_unused(problem, [name for name in loaded.keywords if name not in taken])
    return taken


def _initialize(loaded: LoadedProblem, options: dict[str, Any]) -> tuple[Initialization, Any]:
    """Write the weights; the data come back, for an iterator gives them only once."""
    from hessinit.comparing.batching import Examples, read_data
    from hessinit.initializing.initialize import initialize_

    read = read_data(loaded.batch, options.get("batch_size", 1), options["steps"])
    pairs = [(part.inputs, part.targets) for part in read.parts()]
    seed = options.get("seed", 0)
    if isinstance(read, Examples):
        read = Examples(read.whole, min(EXAMPLES_TO_INITIALIZE, read.examples))
    batch = read.starting_batch(seed)
    shared = ("lr", "optimizer", "layers", "curvature", "forward", "seed")
    result = initialize_(
        loaded.model,
        loaded.loss,
        (batch.inputs, batch.targets),
        **{name: options[name] for name in shared if name in options},
    )
    return result, pairs[0] if isinstance(read, Examples) else pairs


def _train(loaded: LoadedProblem, data: Any, lines: Path, options: dict[str, Any]) -> Tracking:
    from hessinit.cli.comparing import stdout_for_the_result
    from hessinit.jobs.watching import watched
    from hessinit.present.numbers import format_number
    from hessinit.tracking.training import train_and_track

    last = LastPoint(lines)
    is_watched = sys.stderr.isatty()
    with stdout_for_the_result(), watched("Training", options["steps"], 0, is_watched) as announce:

        def report(step: int, loss: float) -> None:
            norm = last.norm()
            measured = "" if norm is None else f", ‖H‖ {format_number(norm)}"
            announce(f"step {step}: loss {format_number(loss)}{measured}", 1)

        return train_and_track(loaded.model, loaded.loss, data, path=lines, progress=report, **options)


def _read_back(lines: Path) -> Tracking:
    """What was tracked until an interruption."""
    from hessinit.report.tracking import Tracking

    if not lines.exists():
        typer.echo("Interrupted: stopped before the first step, and nothing was written.", err=True)
        raise typer.Exit(INTERRUPTED)
    return Tracking.load(lines)


def _steps_of(tracking: Tracking) -> int:
    seen = [*(point.step for point in tracking.points[-1:]), *(step for step, _ in tracking.losses[-1:])]
    return max(seen, default=0)
