"""`hessinit compare`, `sweep` and `track`: trainings of the user's network."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hessinit.cli.failures import (
    INTERRUPTED,
    failures_explained,
    interruption_explained,
    raise_when_interrupted,
    stop,
)
from hessinit.cli.options import (
    AsHtml,
    AsJson,
    BatchSize,
    Device,
    Folder,
    Layers,
    Optimizer,
    Picture,
    Save,
    Seed,
    Seeds,
    Steps,
    Threads,
    TrainedProblem,
    Warmup,
    Which,
    WithoutCurvature,
    Workers,
    check_rate,
    given,
    split,
)
from hessinit.cli.output import Output, progress, stdout_for_results
from hessinit.cli.problem_file import (
    LoadedProblem,
    file_of,
    find_problem,
    load_problem,
    load_rebuildable,
    shared_keywords,
)

if TYPE_CHECKING:
    from hessinit.results.initialization import Initialization
    from hessinit.results.track_record import Tracking

TRACKED = 256  # examples on which the curvature is tracked, and to which the weights are fitted
# What a problem may say to `measure` that means the same to track.
SHARED = ("forward", "layers", "curvature", "reduction", "check")


def compare(
    problem: TrainedProblem,
    schemes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Separated by commas: default (the weights as they come), a scheme such as he or lsuv, or "
            "hessinit; NAME+warmup adds a warmup.  [default: default,he,glorot,orthogonal,lsuv,hessinit]",
        ),
    ] = None,
    learning_rates: Annotated[
        list[str] | None,
        typer.Option(metavar="X,…", help="Separated by commas.  [default: 0.003,0.01,0.03,0.1,0.3]"),
    ] = None,
    seeds: Seeds = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    optimizer: Optimizer = None,
    warmup: Warmup = None,
    no_curvature: WithoutCurvature = False,
    folder: Folder = None,
    workers: Workers = None,
    device: Device = None,
    as_json: AsJson = False,
    html: AsHtml = None,
    save: Save = None,
    picture: Picture = None,
) -> None:
    """Train briefly from several initializations, and see which is best.

    Every scheme is tried at every learning rate with every seed; the same seed gives the same numbers.

    \b
    Examples:
      hessinit compare net.py:problem
      hessinit compare net.py:problem --schemes he,lsuv+warmup --learning-rates 0.1
      hessinit compare net.py:problem --folder runs --html comparison.html
      hessinit compare net.py:problem --steps 1000 --picture comparison.png

    \b
    where net.py holds, for example:
      def problem():
          model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 3))
          data = torch.randn(1000, 20), torch.randint(3, (1000,))
          return model, nn.CrossEntropyLoss(), data

    With --folder an interrupted comparison goes on where it was, and further schemes, rates and seeds are
    added to those there.

    Exit status: 0 done, 2 wrong usage, 130 interrupted.
    """
    _run_grid(
        "compare", problem, Output(as_json, html, save, picture), schemes=split(schemes, str),
        learning_rates=split(learning_rates, float), seeds=seeds, steps=steps, batch_size=batch_size,
        optimizer=optimizer, warmup=warmup, curvature_at_start=False if no_curvature else None,
        folder=folder, workers=workers, device=device,
    )  # fmt: skip


def sweep(
    problem: TrainedProblem,
    stds: Annotated[
        list[str] | None,
        typer.Option(
            metavar="X,…",
            help="Standard deviations of the weights, separated by commas.  "
            "[default: 1,0.5,0.1,0.075,0.05,0.005]",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(callback=check_rate, metavar="X", help="The learning rate.  [default: 0.01]"),
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="Draw only these weights: names or patterns, as fc1,'conv*'."),
    ] = None,
    seeds: Seeds = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    optimizer: Optimizer = None,
    warmup: Warmup = None,
    no_curvature: WithoutCurvature = False,
    folder: Folder = None,
    workers: Workers = None,
    device: Device = None,
    as_json: AsJson = False,
    html: AsHtml = None,
    save: Save = None,
    picture: Picture = None,
) -> None:
    """Draw weights of several sizes; see ‖H‖ and the loss of each.

    The paper's experiment: weights from N(0, std²), biases 0, the curvature of each layer, a short training.

    \b
    Examples:
      hessinit sweep net.py:problem
      hessinit sweep net.py:problem --stds 0.1,0.05 --learning-rate 0.1
      hessinit sweep net.py:problem --layers 'conv*' --picture sweep.png

    The function is as for hessinit compare.

    Exit status: 0 done, 2 wrong usage, 130 interrupted.
    """
    _run_grid(
        "sweep", problem, Output(as_json, html, save, picture), stds=split(stds, float),
        learning_rate=learning_rate, layers=split(layers, str), seeds=seeds, steps=steps,
        batch_size=batch_size, optimizer=optimizer, warmup=warmup,
        curvature_at_start=False if no_curvature else None, folder=folder, workers=workers, device=device,
    )  # fmt: skip


def _run_grid(verb: str, problem: str, output: Output, **options: Any) -> None:
    output.check(reads=file_of(problem))
    with (
        interruption_explained("stopped before the first run."),
        failures_explained(f"comparing initializations of {problem}"),
    ):
        place = find_problem(problem)
        with progress(f"Loading {problem} …"):
            import hessinit

            run = getattr(hessinit, verb)
            raise_when_interrupted()
            loaded = load_rebuildable(place)
        keywords = shared_keywords(loaded, ["forward"], problem)
        with stdout_for_results():
            comparison = run(loaded.model, loaded.loss, loaded.batch, **keywords, **given(**options))
    output.write(comparison)


def track(
    problem: TrainedProblem,
    lr: Annotated[
        float, typer.Option(callback=check_rate, metavar="X", help="The learning rate.", show_default=False)
    ],
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Training steps.")] = 200,
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
        bool, typer.Option("--each-layer", help="Track every layer, not only the network.")
    ] = False,
    max_overhead: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Maximum fraction of wall-clock time spent measuring.  [default: 0.1]"
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option("--log", metavar="FILE", help="Write every point there at once, as a line of JSON."),
    ] = None,
    layers: Layers = None,
    curvature: Which = None,
    seed: Seed = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
    html: AsHtml = None,
    save: Save = None,
    picture: Picture = None,
) -> None:
    """Train for a while, and track ‖H‖ and the stability limit.

    Prints the loss, lr·‖H‖ and lr / limit of the optimizer, every so many steps. Ctrl-C ends the training and
    shows what was tracked until then.

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
    output.check(reads=file_of(problem), more={"--log": log})
    if log is not None and log.exists():
        stop(f"--log {log} exists and was left as it is; give another name, or remove it first.")
    options = given(
        lr=lr, steps=steps, every=every, optimizer=optimizer, batch_size=batch_size, warmup=warmup,
        each_layer=each_layer or None, max_overhead=max_overhead, layers=split(layers, str),
        curvature=curvature, seed=seed, name=problem,
    )  # fmt: skip
    initialization: Initialization | None = None
    interrupted = False
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = log or Path(folder, "curvature.jsonl")
        try:
            with failures_explained(f"tracking {problem}"):
                place = find_problem(problem)
                with progress(f"Loading {problem} …"):
                    import hessinit
                    import hessinit.training.train_and_track

                    loaded = load_problem(place, seed=seed, device=device, threads=threads)
                    options = {**shared_keywords(loaded, SHARED, problem), **options}
                    data = loaded.batch
                    if initialize:
                        initialization, data = _initialize(loaded, options)
                tracking = _train(loaded, data, path, options)
        except KeyboardInterrupt:
            interrupted = True
            if not path.exists():
                typer.echo("Interrupted: stopped before the first step, and nothing was written.", err=True)
                raise typer.Exit(INTERRUPTED) from None
            tracking = hessinit.load(path)
    output.write(replace(tracking, initialization=initialization), before=initialization)
    if log is not None:
        typer.echo(f"Wrote {log}.", err=True)
    if interrupted:
        done = max((point.step for point in tracking.points), default=0)
        done = max([done, *(step for step, _ in tracking.losses[-1:])])
        typer.echo(f"Interrupted: stopped after {done} of {steps} steps.", err=True)
        raise typer.Exit(INTERRUPTED)


def _initialize(loaded: LoadedProblem, options: dict[str, Any]) -> tuple[Initialization, Any]:
    """Write the weights; the data are returned, for an iterator gives them only once."""
    import hessinit
    from hessinit.training.data import read_data

    read = read_data(loaded.batch, options.get("batch_size", 1), options["steps"])
    pairs = [(part.inputs, part.targets) for part in read.parts]
    # On the examples whose curvature is tracked, so that the table begins with the ‖H‖ that was met.
    tracked = [(part.inputs, part.targets) for part in read.tracked_batches(TRACKED, options.get("seed", 0))]
    shared = ("lr", "optimizer", "layers", "curvature", "forward", "reduction", "check", "seed")
    result = hessinit.initialize_(
        loaded.model,
        loaded.loss,
        tracked[0] if len(tracked) == 1 else tracked,
        **{name: options[name] for name in shared if name in options},
    )
    return result, pairs if read.ready else pairs[0]


def _train(loaded: LoadedProblem, data: Any, path: Path, options: dict[str, Any]) -> Tracking:
    from hessinit.present.words import format_number
    from hessinit.training.train_and_track import train_and_track
    from hessinit.training.workers import progress_bar

    with (
        stdout_for_results(),
        progress_bar("Training", options["steps"], 0, sys.stderr.isatty()) as advance,
    ):
        return train_and_track(
            loaded.model, loaded.loss, data, path=path, examples=TRACKED, **options,
            progress=lambda step, loss: advance(f"step {step}: loss {format_number(loss)}", 1),
        )  # fmt: skip
