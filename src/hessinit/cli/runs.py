"""`hessinit compare`, `sweep` and `track` train the user's network; `reproduce` trains the paper's."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import hessinit
from hessinit.cli import options
from hessinit.cli.failures import INTERRUPTED, NOT_MET, failures_explained, import_torch, stop
from hessinit.cli.output import Output, progress, stdout_for_results
from hessinit.cli.problem_file import (
    Builder,
    LoadedProblem,
    find_problem,
    load_problem,
    shared_keywords,
)
from hessinit.present.comparison import any_learns
from hessinit.present.words import count, format_number

TRACKED = 256  # examples on which the curvature is tracked, and to which the weights are fitted
# What a problem may say to `measure` that means the same to track.
SHARED = ("optimizer", "forward", "layers", "curvature", "reduction", "check")
REPRODUCTION = Path("reproduction")
# an example, and the seconds until it has answered
SCHEDULER = "tcp://192.168.0.10:8786"
CONNECTING = 5


def compare(
    problem: options.TrainedProblem,
    schemes: Annotated[
        list[str] | None,
        options.names(
            "default (the weights as they come), a scheme such as he or lsuv, or hessinit; NAME+warmup adds "
            "a warmup.  [default: default,he,glorot,orthogonal,lsuv,hessinit]"
        ),
    ] = None,
    learning_rates: Annotated[
        list[str] | None, options.numbers("The learning rates.  [default: 0.003,0.01,0.03,0.1,0.3]")
    ] = None,
    seeds: options.Seeds = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    optimizer: options.Optimizer = None,
    warmup: options.Warmup = None,
    no_curvature: options.WithoutCurvature = False,
    folder: options.Folder = None,
    workers: options.Workers = None,
    dask: options.Dask = None,
    device: options.Device = None,
    as_json: options.AsJson = False,
    html: options.AsHtml = None,
    save: options.Save = None,
    picture: options.Picture = None,
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
    _run_grid("compare", **locals())  # every option under its own name


def sweep(
    problem: options.TrainedProblem,
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
    seeds: options.Seeds = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    optimizer: options.Optimizer = None,
    warmup: options.Warmup = None,
    no_curvature: options.WithoutCurvature = False,
    folder: options.Folder = None,
    workers: options.Workers = None,
    dask: options.Dask = None,
    device: options.Device = None,
    as_json: options.AsJson = False,
    html: options.AsHtml = None,
    save: options.Save = None,
    picture: options.Picture = None,
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
    _run_grid("sweep", **locals())


def _run_grid(
    verb: str,
    problem: str,
    as_json: bool,
    html: Path | None,
    save: Path | None,
    picture: Path | None,
    **chosen: Any,
) -> None:
    place = find_problem(problem)
    output = Output(as_json, html, save, picture, reads=place.file)
    chosen = options.given(**chosen)
    if chosen.pop("no_curvature", False):
        chosen["measure_curvature"] = False
    with (
        failures_explained(
            f"comparing initializations of {problem}", "stopped before the first run."
        ),
        _cluster(chosen.pop("dask", None), chosen.get("workers")) as chosen["executor"],
    ):
        with progress(f"Loading {problem} …"):
            build = Builder(place)
            loaded = build.load(chosen.get("device"))
            if (optimizer := chosen.pop("optimizer", None)) is not None:
                loaded = loaded.with_optimizer(optimizer)
        keywords = shared_keywords(loaded, ["optimizer", "forward"], problem)
        with stdout_for_results():
            comparison = getattr(hessinit, verb)(
                build, loaded.loss, loaded.batch, **keywords, **chosen
            )
    output.write(comparison)
    if not any_learns(comparison):
        stop("Nothing learned: the result says more.", NOT_MET)


@contextmanager
def _cluster(address: str | None, workers: int | None) -> Iterator[Any]:
    """The executor of the Dask cluster at that address; None without one."""
    if address is None:
        yield None
        return
    if workers is not None:
        stop(f"--workers {workers} and --dask {address} are both given; leave out one of them.")
    if not re.fullmatch(r"(tcp|tls|ucx|wss?)://.+:\d+", address):
        stop(
            f"--dask {address} must be an address with its protocol and port, such as {SCHEDULER}."
        )
    try:
        from distributed import Client, Security, rpc
    except ImportError:
        stop('--dask needs Dask, which is not installed. Run pip install "hessinit[dask]".')

    async def greet() -> (
        None
    ):  # before the client is made, which hangs where something else answers
        async with rpc(address, connection_args=Security().get_connection_args("client")) as remote:
            if (kind := (await remote.identity())["type"]) != "Scheduler":
                raise ValueError(f"there is a {kind}")

    for name in ("distributed", "distributed.client", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what goes wrong is told as an error
    try:
        asyncio.run(asyncio.wait_for(greet(), CONNECTING))
        client = Client(address, timeout=CONNECTING, set_as_default=False)
    except Exception as failure:
        stop(
            f"--dask {address}: no Dask scheduler answers there within {CONNECTING} s ({failure!r}). Start "
            "one with `dask scheduler`, and give the address it prints."
        )
    with client:
        yield client.get_executor()


def track(
    problem: options.TrainedProblem,
    lr: Annotated[float, options.rate("The learning rate.", show_default=False)],
    steps: Annotated[int, options.whole("Training steps.")] = 200,
    every: Annotated[
        int | None, options.whole("Measure every so many steps.  [default: 10]")
    ] = None,
    optimizer: options.Optimizer = None,
    batch_size: options.BatchSize = None,
    warmup: options.Warmup = None,
    initialize: Annotated[
        bool,
        typer.Option("--initialize", help="First give it weights whose curvature fits the rate."),
    ] = False,
    overwrite: options.Overwrite = False,
    each_layer: Annotated[
        bool, typer.Option("--each-layer", help="Track every layer, not only the network.")
    ] = False,
    max_overhead: Annotated[
        float | None,
        options.number(
            "Maximum fraction of the time spent measuring; 5 s are always allowed.  [default: 0.1]"
        ),
    ] = None,
    log: Annotated[
        Path | None, options.path("Write every point there at once, as a line of JSON.")
    ] = None,
    layers: options.Layers = None,
    curvature: options.OneCurvature = None,
    seed: options.Seed = None,
    device: options.Device = None,
    as_json: options.AsJson = False,
    html: options.AsHtml = None,
    save: options.Save = None,
    picture: options.Picture = None,
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
    place = find_problem(problem)
    output = Output(as_json, html, save, picture, log=log, reads=place.file)
    if log is not None and log.exists():
        stop(f"--log {log} exists and was left as it is; give another name, or remove it first.")
    chosen = options.given(
        lr=lr,
        steps=steps,
        every=every,
        batch_size=batch_size,
        warmup=warmup,
        each_layer=each_layer,
        max_overhead=max_overhead,
        layers=layers,
        curvature=curvature,
        seed=seed,
        name=problem,
    )
    initialization = None
    interrupted = False
    with tempfile.TemporaryDirectory() as folder:
        path = log or Path(folder, "curvature.jsonl")
        try:
            with failures_explained(f"tracking {problem}"):
                with progress(f"Loading {problem} …"):
                    loaded = load_problem(place, seed=seed, device=device, optimizer=optimizer)
                    chosen = {**shared_keywords(loaded, SHARED, problem), **chosen}
                    if initialize:
                        initialization, loaded = _fit(loaded, chosen, overwrite)
                tracking = _train(loaded, path, chosen)
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
        done = max(
            [0, *(point.step for point in tracking.points), *(step for step, _ in tracking.losses)]
        )
        stop(f"Interrupted: stopped after {done} of {steps} steps.", INTERRUPTED)


def _fit(
    loaded: LoadedProblem, chosen: dict[str, Any], overwrite: bool
) -> tuple[hessinit.Initialization, LoadedProblem]:
    """Write the weights, and return the data as read: an iterator gives them only once."""
    from hessinit.training.data import read_data

    data = read_data(loaded.batch, chosen.get("batch_size", 64), chosen["steps"])
    # On the examples whose curvature is tracked, so that the table begins with the ‖H‖ that was
    # met.
    tracked = [
        (part.inputs, part.targets) for part in data.tracked_batches(TRACKED, chosen.get("seed", 0))
    ]
    shared = ("lr", "optimizer", "layers", "curvature", "forward", "reduction", "check", "seed")
    given = {name: chosen[name] for name in shared if name in chosen} | {"overwrite": overwrite}
    batch = tracked[0] if len(tracked) == 1 else tracked
    return hessinit.initialize_(loaded.model, loaded.loss, batch, **given), loaded._replace(
        batch=data
    )


def _train(loaded: LoadedProblem, path: Path, chosen: dict[str, Any]) -> hessinit.Tracking:
    from hessinit.training.loop import train_and_track
    from hessinit.training.workers import progress_bar

    with (
        stdout_for_results(),
        progress_bar("Training", chosen["steps"], 0, sys.stderr.isatty()) as advance,
    ):
        return train_and_track(
            loaded.model,
            loaded.loss,
            loaded.batch,
            path=path,
            examples=TRACKED,
            **chosen,
            progress=lambda step, loss: advance(f"step {step}: loss {format_number(loss)}", 1),
        )


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="table-1 to table-5, figure-1 or -2, word2vec, or all.",
            show_default=False,
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="paper: the sets the paper used, and Fashion-MNIST; digits: what is embedded, without any "
            "download; or one of mnist, fashion-mnist, cifar-10, wikipedia.",
        ),
    ] = "paper",
    data_dir: Annotated[
        Path | None,
        options.path(
            "Where the published files are. Without it images are downloaded once, into your cache; a "
            "Wikipedia text must be given.",
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
    workers: options.Workers = None,
    dask: options.Dask = None,
    as_json: options.AsJson = False,
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
            f"reproducing {' '.join(names)}", "the same command continues from what is kept."
        ),
        _cluster(dask, workers) as executor,
        stdout_for_results(),
    ):
        import_torch()
        from hessinit_paper import reproduce as verb

        found = verb(
            *names,
            data=data,
            data_dir=data_dir,
            seeds=seeds,
            variant=variant,
            folder=folder,
            workers=workers,
            executor=executor,
        )
    Output(as_json).write(list(found) if as_json or len(found) > 1 else found[0])
    if data == "digits" and "all" in names:
        typer.echo(
            "word2vec was left out: it needs a text, --data wikipedia --data-dir DIR.", err=True
        )
    typer.echo(
        f"Wrote {count(len(found), 'record')} and the page {folder / 'reproduce.html'}.", err=True
    )
