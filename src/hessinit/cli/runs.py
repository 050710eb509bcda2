"""The commands that train: `hessinit compare`, `sweep`, `track`, and the paper's `reproduce`."""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import hessinit
from hessinit.cli import options
from hessinit.cli.failures import INTERRUPTED, NOT_MET, failures_explained, import_torch, stop
from hessinit.cli.output import Output, progress, stdout_for_results
from hessinit.cli.problem_file import Builder, find_problem, load_problem
from hessinit.present.words import count, format_number
from hessinit.progress import StepCounter, progress_bar

TRACKED = 256  # examples on which the curvature is tracked, and to which the weights are fitted
REPRODUCTION = Path("reproduction")
SCHEDULER = "tcp://192.168.0.10:8786"  # an example
CONNECTING = 5  # seconds until a scheduler has answered


@dataclass(frozen=True)
class GridOptions:
    """The runs of `compare` and `sweep`."""

    seeds: Annotated[int | None, options.whole("How many seeds for each.  [default: 3]")] = None
    steps: Annotated[
        int | None, options.whole("Training steps of each run.  [default: 200]", 10)
    ] = None
    batch_size: options.BatchSize = None
    optimizer: options.Optimizer = None
    clip_norm: options.ClipNorm = None
    warmup: options.Warmup = None
    no_curvature: Annotated[
        bool, typer.Option("--no-curvature", help="Do not measure ‖H‖ before training.")
    ] = False
    folder: Annotated[
        Path | None, options.path("Keep finished runs there; the same command continues.", "DIR")
    ] = None
    device: options.Device = None


@dataclass(frozen=True)
class WorkerOptions:
    """Who does the runs."""

    workers: Annotated[
        int | None, options.whole("How many processes.  [default: one for each core]")
    ] = None
    dask: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on a Dask cluster: its scheduler, as tcp://host:8786. Threads of a worker "
            "take turns.",
        ),
    ] = None


@dataclass(frozen=True)
class TrainingOptions:
    """The training that `track` looks at."""

    steps: Annotated[int, options.whole("Training steps.")] = 200
    optimizer: options.Optimizer = None
    clip_norm: options.ClipNorm = None
    batch_size: options.BatchSize = None
    warmup: options.Warmup = None
    seed: options.Seed = None
    device: options.Device = None


@dataclass(frozen=True)
class TrackedOptions:
    """What `track` measures, and when."""

    every: Annotated[int, options.whole("Measure every so many steps.")] = 10
    each_layer: Annotated[
        bool, typer.Option("--each-layer", help="Track every layer, not only the network.")
    ] = False
    max_overhead: Annotated[
        float,
        options.number("Maximum fraction of the time spent measuring; 5 s are always allowed."),
    ] = 0.1
    log: Annotated[
        Path | None, options.path("Write every point there at once, as a line of JSON.")
    ] = None
    layers: options.Layers = None
    curvature: options.OneCurvature = None


@options.with_groups
def compare(
    problem: options.TrainedProblem,
    *,
    schemes: Annotated[
        list[str] | None,
        options.names(
            "default (the weights as they come), a scheme such as he or lsuv, or hessinit; "
            "NAME+warmup adds a warmup.  [default: default,he,glorot,orthogonal,lsuv,hessinit]"
        ),
    ] = None,
    learning_rates: Annotated[
        list[str] | None, options.numbers("The learning rates.  [default: 0.003,0.01,0.03,0.1,0.3]")
    ] = None,
    grid: GridOptions,
    worker: WorkerOptions,
    result: options.ResultOptions,
) -> None:
    """Train briefly from several initializations; see which is best.

    Every scheme is tried at every learning rate with every seed; the same seed gives the same
    numbers.

    \b
    Examples:
      hessinit compare net.py:problem
      hessinit compare net.py:problem --schemes he,lsuv+warmup --learning-rates 0.1
      hessinit compare net.py:problem --folder runs --html comparison.html
      hessinit compare net.py:problem --steps 1000 --picture comparison.png

    With --folder an interrupted comparison continues where it stopped, and further schemes,
    learning rates and seeds are added to those in the folder.

    Exit status: 0 done, 1 nothing learned, 2 wrong usage, 130 interrupted.
    """
    chosen = options.given(schemes=schemes, learning_rates=learning_rates)
    _run_grid(compare, problem, grid, worker, result, chosen)


@options.with_groups
def sweep(
    problem: options.TrainedProblem,
    *,
    stds: Annotated[
        list[str] | None,
        options.numbers(
            "Standard deviations of the weights.  [default: 1,0.5,0.1,0.075,0.05,0.005]"
        ),
    ] = None,
    learning_rate: Annotated[
        float | None, options.rate("The learning rate.  [default: 0.01]")
    ] = None,
    layers: Annotated[
        list[str] | None,
        options.names("Draw only these weights: names or patterns, as fc1,'conv*'."),
    ] = None,
    grid: GridOptions,
    worker: WorkerOptions,
    result: options.ResultOptions,
) -> None:
    """Draw weights of several sizes; see ‖H‖ and the loss of each.

    The paper's experiment: weights from N(0, std²), biases 0, the curvature of each layer, a short
    training.

    \b
    Examples:
      hessinit sweep net.py:problem
      hessinit sweep net.py:problem --stds 0.1,0.05 --learning-rate 0.1
      hessinit sweep net.py:problem --layers 'conv*' --picture sweep.png

    Exit status: 0 done, 1 nothing learned, 2 wrong usage, 130 interrupted.
    """
    chosen = options.given(stds=stds, learning_rate=learning_rate, layers=layers)
    _run_grid(sweep, problem, grid, worker, result, chosen)


def _run_grid(
    command: Callable[..., None],
    source: str,
    grid: GridOptions,
    worker: WorkerOptions,
    result: options.ResultOptions,
    chosen: dict[str, Any],
) -> None:
    location = find_problem(source)
    output = Output(result, reads=location.file)
    with (
        failures_explained(
            command, f"comparing initializations of {source}", "stopped before the first run."
        ),
        _cluster(worker) as executor,
    ):
        with progress(f"Loading {source} …"):
            build = Builder(location)
            loaded = build.load(grid.device)
            loaded = loaded.with_optimizer(grid.optimizer, grid.clip_norm)
        loaded = loaded.keep_shared(["optimizer"], source)
        chosen |= options.given(
            seeds=grid.seeds,
            steps=grid.steps,
            batch_size=grid.batch_size,
            optimizer=loaded.keywords.get("optimizer"),
            folder=grid.folder,
        )
        settings = hessinit.RunSettings(
            warmup=grid.warmup,
            measure_curvature=not grid.no_curvature,
            workers=worker.workers,
            executor=executor,
            device=grid.device,
        )
        with stdout_for_results():
            verb = getattr(hessinit, command.__name__)
            comparison = verb(build, loaded.problem, loaded.batch, settings=settings, **chosen)
    output.write(comparison)
    if not comparison.learners:
        stop("Nothing learned: the result says more.", NOT_MET)


@contextmanager
def _cluster(worker: WorkerOptions) -> Iterator[Any]:
    """Yield the executor of the Dask cluster, or None without one."""
    address = worker.dask
    if address is None:
        yield None
        return
    if worker.workers is not None:
        stop(
            f"--workers {worker.workers} and --dask {address} are both given; leave out one of "
            "them."
        )
    if not re.fullmatch(r"(tcp|tls|ucx|wss?)://.+:\d+", address):
        stop(
            f"--dask {address} must be an address with its protocol and port, such as {SCHEDULER}."
        )
    try:
        from distributed import Client, Security, rpc
    except ImportError:
        stop('--dask needs Dask, which is not installed. Run pip install "hessinit[dask]".')

    async def greet() -> None:
        # Before the client is made, which hangs where something else answers.
        async with rpc(address, connection_args=Security().get_connection_args("client")) as remote:
            kind = (await remote.identity())["type"]
            if kind != "Scheduler":
                raise ValueError(f"there is a {kind}")

    for name in ("distributed", "distributed.client", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # errors say what goes wrong
    try:
        asyncio.run(asyncio.wait_for(greet(), CONNECTING))
        client = Client(address, timeout=CONNECTING, set_as_default=False)
    except Exception as failure:
        stop(
            f"--dask {address}: no Dask scheduler answers there within {CONNECTING} s "
            f"({failure!r}). Start one with `dask scheduler`, and give the address it prints."
        )
    with client:
        yield client.get_executor()


@options.with_groups
def track(
    problem: options.TrainedProblem,
    lr: Annotated[float, options.rate("The learning rate.", show_default=False)],
    *,
    initialize: Annotated[
        bool,
        typer.Option("--initialize", help="First give it weights whose curvature fits the rate."),
    ] = False,
    overwrite: options.Overwrite = False,
    training: TrainingOptions,
    tracked: TrackedOptions,
    result: options.ResultOptions,
) -> None:
    """Train for a while, and track ‖H‖ and the stability limit.

    Prints the loss, lr·‖H‖ and lr / limit of the optimizer, every so many steps. Ctrl-C ends the
    training and shows what was tracked until then.

    \b
    Examples:
      hessinit track net.py:problem --lr 0.1
      hessinit track net.py:problem --lr 0.1 --initialize --html track.html
      hessinit track net.py:problem --lr 0.01 --optimizer adam --steps 1000 --every 50
      hessinit track net.py:problem --lr 0.1 --each-layer --log curvature.jsonl

    In a training loop of your own, use hessinit.track.

    Exit status: 0 done, 2 wrong usage, 130 interrupted.
    """
    location = find_problem(problem)
    log = tracked.log
    output = Output(result, log=log, reads=location.file)
    if log is not None and log.exists():
        stop(f"--log {log} exists and was left as it is; give another name, or remove it first.")
    initialization = None
    interrupted = False
    with tempfile.TemporaryDirectory() as folder:
        path = log or Path(folder, "curvature.jsonl")
        try:
            with failures_explained(track, f"tracking {problem}"):
                with progress(f"Loading {problem} …"):
                    run = _load_training(problem, training, tracked)
                    if initialize:
                        initialization = _fit(run, lr, overwrite)
                tracking = _train(run, problem, lr, training, tracked, path)
        except KeyboardInterrupt:
            interrupted = True
            if not path.exists():
                stop(
                    "Interrupted: stopped before the first step, and nothing was written.",
                    INTERRUPTED,
                )
            tracking = hessinit.load(path)
    output.write(replace(tracking, initialization=initialization), before=initialization)
    if log is not None:
        typer.echo(f"Wrote {log}.", err=True)
    if interrupted:
        steps = [point.step for point in tracking.points] + [step for step, _ in tracking.losses]
        done = max(steps, default=0)
        stop(f"Interrupted: stopped after {done} of {training.steps} steps.", INTERRUPTED)


class _Training(NamedTuple):
    """A training that is tracked, as the problem's file and the options say."""

    problem: hessinit.Problem
    data: Any
    optimizer: Any
    curvature: str


def _load_training(source: str, training: TrainingOptions, tracked: TrackedOptions) -> _Training:
    from hessinit.training.loop import read_data

    computing = options.ComputeOptions(training.seed, training.device)
    loaded = load_problem(find_problem(source), computing, training.optimizer, training.clip_norm)
    loaded = loaded.keep_shared(["optimizer", "curvature"], source).with_options(
        options.given(layers=tracked.layers, seed=training.seed, curvature=tracked.curvature)
    )
    # An iterator gives its batches only once.
    data = read_data(loaded.batch, training.batch_size or 64, training.steps)
    batch = data.tracked_batch(TRACKED, loaded.problem.seed)
    return _Training(
        problem=replace(loaded.problem, batch=batch),
        data=data,
        optimizer=loaded.keywords.get("optimizer", "sgd"),
        curvature=loaded.keywords.get("curvature", "gauss-newton"),
    )


def _fit(run: _Training, lr: float, overwrite: bool) -> hessinit.Initialization:
    """Write weights that fit the rate, on the examples whose curvature is tracked.

    So the table begins with the ‖H‖ that was met.
    """
    return hessinit.initialize_(
        run.problem,
        lr=lr,
        optimizer=run.optimizer,
        fit=hessinit.Fit(curvature=run.curvature, overwrite=overwrite),
    )


def _train(
    run: _Training,
    source: str,
    lr: float,
    training: TrainingOptions,
    tracked: TrackedOptions,
    path: Path,
) -> hessinit.Tracking:
    from hessinit.training.loop import train_and_track

    with stdout_for_results(), progress_bar("Training") as report:
        counter = StepCounter("steps", report, training.steps)
        return train_and_track(
            run.problem,
            run.data,
            lr=lr,
            steps=training.steps,
            optimizer=run.optimizer,
            warmup=training.warmup or 0,
            name=source,
            on_step=lambda step, loss: counter.step(f"loss {format_number(loss)}"),
            path=path,
            settings=hessinit.TrackSettings(
                curvature=run.curvature, each_layer=tracked.each_layer, warn=False
            ),
            every=tracked.every,
            max_overhead=tracked.max_overhead,
        )


@options.with_groups
def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="table-1 to table-5, figure-1 or -2, word2vec, or all.",
            show_default=False,
        ),
    ],
    *,
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="paper: the sets the paper used, and Fashion-MNIST; digits: what is embedded, "
            "without any download; or one of mnist, fashion-mnist, cifar-10, wikipedia.",
        ),
    ] = "paper",
    data_dir: Annotated[
        Path | None,
        options.path(
            "Where the published files are. Without it images are downloaded once, into your "
            "cache; a Wikipedia text must be given.",
            "DIR",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        options.whole("How many restarts or trainings; the default depends on the table."),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Another choice of what the paper does not specify."),
    ] = None,
    folder: Annotated[
        Path, options.path("Keep everything here, and go on from it.", "DIR")
    ] = REPRODUCTION,
    as_json: options.AsJson = False,
    worker: WorkerOptions,
) -> None:
    """Make the paper's tables and figures again, beside its own.

    Prints every table: printed, ours, and whether the difference is within what is claimed. The
    folder gets a record for each (JSON, with all raw values), the figures, and a page with
    everything: reproduce.html.

    \b
    Examples:
      hessinit reproduce all --data digits
      hessinit reproduce table-4
      hessinit reproduce table-2 table-3 --data-dir data
      hessinit reproduce table-4 --variant one-hidden

    With digits nothing is downloaded, and all takes minutes. After an interruption the same command
    goes on where it was, to the same numbers.

    Exit status: 0 done, 2 wrong usage, 130 interrupted.
    """
    with (
        failures_explained(
            reproduce,
            f"reproducing {' '.join(names)}",
            "the same command continues from what is kept.",
        ),
        _cluster(worker) as executor,
        stdout_for_results(),
    ):
        import_torch()
        from hessinit_paper import reproduce as verb

        records = verb(
            *names,
            data=data,
            data_dir=data_dir,
            seeds=seeds,
            variant=variant,
            folder=folder,
            workers=worker.workers,
            executor=executor,
        )
    shown = records[0] if len(records) == 1 and not as_json else list(records)
    Output(options.ResultOptions(as_json)).write(shown)
    if data == "digits" and "all" in names:
        typer.echo(
            "word2vec was left out: it needs a text, --data wikipedia --data-dir DIR.", err=True
        )
    typer.echo(
        f"Wrote {count(len(records), 'record')} and the page {folder / 'reproduce.html'}.", err=True
    )
