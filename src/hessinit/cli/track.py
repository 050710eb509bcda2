"""`hessinit track`: train the user's network for a while, and follow its curvature."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hessinit.cli.failures import failures_explained, stop
from hessinit.cli.interrupts import INTERRUPTED
from hessinit.cli.loading import load_ready, take_shared
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
from hessinit.cli.output import Output
from hessinit.cli.progress import working
from hessinit.cli.tailing import Lines
from hessinit.cli.wording import in_words_of
from hessinit.problem_file import LoadedProblem, file_read_for, find_problem

if TYPE_CHECKING:
    from hessinit.results.initialization import Initialization
    from hessinit.results.track_record import Tracking

STEPS = 200
# What a problem may say to `measure` that means the same here.
SHARED = ("forward", "layers", "curvature", "reduction", "check")
TRACKED = 256  # examples on which the curvature is tracked, and to which the weights are fitted

# The library's arguments, as they are called here.
OPTIONS = {
    "lr": "--lr",
    "batch_size": "--batch-size",
    "each_layer": "--each-layer",
    "path": "--log",
    "max_overhead": "--max-overhead",
    **{name: f"--{name}" for name in ("steps", "every", "warmup", "optimizer", "seed")},
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
    max_overhead: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Maximum fraction of wall-clock time spent measuring.  [default: 0.1]"
        ),
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
    output.check(reads=file_read_for(problem), more={"--log": log})
    options = {
        "lr": lr,
        "steps": steps,
        "every": every,
        "optimizer": optimizer.value if optimizer else None,
        "batch_size": batch_size,
        "warmup": warmup,
        "each_layer": each_layer or None,
        "max_overhead": max_overhead,
        "layers": layers or None,
        "curvature": curvature.value if curvature else None,
        "seed": seed,
        "name": problem,
    }
    given = {name: value for name, value in options.items() if value is not None}
    started: Initialization | None = None
    interrupted = False
    lines: Lines | None = None
    with ExitStack() as stack:
        try:
            with (
                failures_explained(problem, "tracking"),
                in_words_of({name: OPTIONS[name] for name in OPTIONS if name in given or name not in SHARED}),
            ):
                place = find_problem(problem)
                with working(f"Loading {problem} …"):
                    _check_early(given)
                    loaded = load_ready(place, seed=seed, device=device, threads=threads)
                    keywords = take_shared(loaded, SHARED, problem)
                    data = loaded.batch
                    if initialize:
                        started, data = _initialize(loaded, {**keywords, **given})
                # A file of our own, which no other run can take; the log is a copy that grows with it.
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                lines = Lines(Path(folder, "lines.jsonl"), log)
                tracking = _train(loaded, data, lines, {**keywords, **given})
        except KeyboardInterrupt:
            interrupted = True
            tracking = _read_back(lines)
        if lines is not None:
            lines.follow()
    try:
        try:
            output.give(replace(tracking, initialization=started), before=started)
        finally:
            if log is not None and lines is not None:
                _say_where(lines, log)
    finally:
        if interrupted:
            typer.echo(f"Interrupted: stopped after {_steps_of(tracking)} of {steps} steps.", err=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _check_early(given: dict[str, Any]) -> None:
    """What can be judged without the user's file is judged before it is run, which may take a while."""
    import hessinit.training.train_and_track  # noqa: F401 - all that is heavy, before an interruption is an exception
    from hessinit.training.track import check_max_overhead

    check_max_overhead(given.get("max_overhead", 0.1))


def _initialize(loaded: LoadedProblem, options: dict[str, Any]) -> tuple[Initialization, Any]:
    """Write the weights; the data come back, for an iterator gives them only once."""
    from hessinit.init.initialize import initialize_
    from hessinit.training.data import read_data

    read = read_data(loaded.batch, options.get("batch_size", 1), options["steps"])
    pairs = [(part.inputs, part.targets) for part in read.parts]
    # The very examples whose curvature is tracked: else the table would begin with another ‖H‖ than was met.
    chosen = read.tracked_batches(TRACKED, options.get("seed", 0))
    tracked = [(part.inputs, part.targets) for part in chosen]
    shared = ("lr", "optimizer", "layers", "curvature", "forward", "reduction", "check", "seed")
    result = initialize_(
        loaded.model,
        loaded.loss,
        tracked[0] if len(tracked) == 1 else tracked,
        **{name: options[name] for name in shared if name in options},
    )
    return result, pairs if read.ready else pairs[0]


def _train(loaded: LoadedProblem, data: Any, lines: Lines, options: dict[str, Any]) -> Tracking:
    from hessinit.cli.comparing import stdout_for_the_result
    from hessinit.present.words import format_number
    from hessinit.training.train_and_track import train_and_track
    from hessinit.training.workers import progress_bar

    is_watched = sys.stderr.isatty()
    with stdout_for_the_result(), progress_bar("Training", options["steps"], 0, is_watched) as announce:

        def report(step: int, loss: float) -> None:
            norm = lines.norm()
            measured = "" if norm is None else f", ‖H‖ {format_number(norm)}"
            announce(f"step {step}: loss {format_number(loss)}{measured}", 1)

        return train_and_track(
            loaded.model, loaded.loss, data, path=lines.path, examples=TRACKED, progress=report, **options
        )


def _read_back(lines: Lines | None) -> Tracking:
    """What was tracked until an interruption."""
    from hessinit.results.track_record import Tracking

    if lines is None or not lines.path.exists():
        typer.echo("Interrupted: stopped before the first step, and nothing was written.", err=True)
        raise typer.Exit(INTERRUPTED)
    return Tracking.load(lines.path)


def _say_where(lines: Lines, log: Path) -> None:
    if lines.failure is not None:
        stop(f"cannot write {log}: {lines.failure.strerror or lines.failure}.")
    if lines.copied_to is not None:
        name = log.with_name(lines.copied_to.name)
        typer.echo(f"Wrote {name}{'' if name == log else f', for {log} was there'}.", err=True)


def _steps_of(tracking: Tracking) -> int:
    seen = [*(point.step for point in tracking.points[-1:]), *(step for step, _ in tracking.losses[-1:])]
    return max(seen, default=0)
