"""`hessinit demo`: measure, initialize and compare on the embedded digits; a page and a picture."""

from __future__ import annotations

import json
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hessinit
from hessinit.cli import options
from hessinit.cli.failures import WRONG_USAGE, failures_explained, stop
from hessinit.cli.output import draw, print_result, print_text, progress, write_file, write_page
from hessinit.digits import load_digits
from hessinit.present import describe
from hessinit.present.demo import Demonstration
from hessinit.results.result import to_plain

if TYPE_CHECKING:
    from torch import Tensor, nn

FOLDER = Path("demo-output")
PAGE = "demo.html"
PICTURE = "curves.png"


@dataclass(frozen=True)
class DemoSettings:
    """The networks and their trainings, chosen before any of it was trained.

    The plain network is that of the former demo, the plainest of at least eight layers that
    PyTorch's own weights train at some rate; the normalized one is the same with a LayerNorm after
    each hidden layer. The rates are the half decades around those in common use; steps are as many
    as `compare` makes, and seeds as many as a minute allows.
    """

    layers: int = 10
    width: int = 64
    examples: int = 256  # that the curvature is measured on: the first of those to train on
    trained_on: int = 1437  # four fifths
    rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    steps: int = 200
    seeds: int = 2
    lr: float = 0.3  # of the report: where PyTorch's own weights do best on the plain network


DEMO = DemoSettings()
STARTS = {"PyTorch": "default", "He": "he", "LSUV": "lsuv", "hessinit": "hessinit"}


def build_network(normalized: bool = False) -> nn.Module:
    """Ten dense layers with tanh between them and PyTorch's own weights."""
    from torch import nn

    pieces: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for number in range(1, DEMO.layers):
        pieces[f"fc{number}"] = nn.Linear(DEMO.width, DEMO.width)
        if normalized:
            pieces[f"norm{number}"] = nn.LayerNorm(DEMO.width)
        pieces[f"tanh{number}"] = nn.Tanh()
    pieces[f"fc{DEMO.layers}"] = nn.Linear(DEMO.width, 10)
    return nn.Sequential(pieces)


def problem(seed: int = 0) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    """Return the demo's network, its loss and 256 digits.

    Other commands take it as `hessinit.cli.demo:problem`.
    """
    import torch

    images, labels = load_digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (
            build_network(),
            torch.nn.CrossEntropyLoss(),
            (images[: DEMO.examples], labels[: DEMO.examples]),
        )


def demo(
    lr: Annotated[float, options.rate("The learning rate to initialize for.")] = DEMO.lr,
    seed: Annotated[
        int, options.whole("Seed of weights and mini-batches.", 0, options.LARGEST_SEED)
    ] = 0,
    folder: Annotated[Path, options.path("Where the files go.", "DIR")] = FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Train on real digits from four starts at six learning rates.

    A deep network is measured and initialized for one rate. Then it is trained from PyTorch's own
    weights, He's, LSUV's and hessinit's, without and with normalization layers. Takes about a
    minute.

    \b
    Examples:
      hessinit demo
      hessinit demo --lr 0.03 --seed 1
      hessinit demo --json --folder results

    Exit status: 0 done, 2 wrong usage, 130 interrupted.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        stop(f"--folder {folder} cannot be made: {failure.strerror}; give another name.")
    started = time.perf_counter()
    page = folder / PAGE
    picture = folder / PICTURE
    with failures_explained(demo, "running the demo", "the demo was not finished."):
        demonstration = _compute(lr, seed, as_json)
        if as_json:
            plain = {"kind": "hessinit demonstration", "schema": 5, **to_plain(demonstration)}
            typer.echo(json.dumps(plain, indent=2, allow_nan=False))
        written = [write_file(page, lambda path: write_page(demonstration, path))]
        written += [write_file(picture, lambda path: draw(demonstration, path))]
    if not all(written):
        raise typer.Exit(WRONG_USAGE)
    if not as_json:
        print_text(
            f"\nOpen {page} in a browser, or look at {picture}:\n{page.resolve().as_uri()}\n\n"
            "Another learning rate: hessinit demo --lr 0.03\n"
            "Your own network: hessinit new problem.py\n"
            f"Everything took {time.perf_counter() - started:.0f} s."
        )


def _compute(lr: float, seed: int, mute: bool) -> Demonstration:
    """Measure, initialize, and train both networks from every start; print each result at once."""

    def say(text: str, result: Any) -> None:
        if not mute:
            print_text(text)
            print_result(result)

    with progress("Loading torch …"):
        import torch

        # So small a network gains nothing from threads, and on a busy machine they wait for each
        # other.
        torch.set_num_threads(1)
    images, labels = load_digits()
    data = images[: DEMO.trained_on], labels[: DEMO.trained_on]
    model, loss, batch = problem(seed)
    measured = hessinit.Problem(model, loss, batch, seed=seed)
    with progress(f"Measuring the network on {DEMO.examples} digits …"):
        report = hessinit.measure(measured)
    say(
        f"1. Ten dense layers with tanh and PyTorch's own weights, on {DEMO.examples} handwritten "
        "digits. ‖H‖ is the curvature of the loss with respect to a layer's weights.\n",
        report,
    )
    with progress(f"Finding weights for lr = {lr:g} …"):
        initialization = hessinit.initialize_(measured, lr=lr)
    say(f"\n2. New weights, whose curvature fits lr = {lr:g}.\n", initialization)
    # The line that announces long work names arguments that the demo does not have.
    settings = hessinit.RunSettings(measure_curvature=False, progress=sys.stderr.isatty())
    plain, normalized = (
        hessinit.compare(
            partial(build_network, has_norms),
            loss,
            data,
            schemes=STARTS,
            learning_rates=DEMO.rates,
            seeds=range(seed, seed + DEMO.seeds),
            steps=DEMO.steps,
            settings=settings,
        )
        for has_norms in (False, True)
    )
    demonstration = Demonstration(initialization=initialization, plain=plain, normalized=normalized)
    document = describe(demonstration)
    say(
        f"\n3. Four starts, {DEMO.steps} steps of SGD on {DEMO.trained_on:,} digits at "
        f"{len(DEMO.rates)} learning rates.\n",
        replace(document, sections=document.sections[:1]),
    )
    return demonstration
