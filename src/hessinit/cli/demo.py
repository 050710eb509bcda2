"""`hessinit demo`: measure, initialize, track and compare on the embedded digits; a page and a picture."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hessinit
from hessinit.cli import options
from hessinit.cli.failures import WRONG_USAGE, failures_explained, stop
from hessinit.cli.output import draw, print_result, print_text, progress, write_file, write_page
from hessinit.digits import load_digits
from hessinit.present.demo import Demonstration
from hessinit.results.result import to_plain

if TYPE_CHECKING:
    from torch import Tensor, nn

FOLDER = Path("demo-output")
PAGE, PICTURE = "demo.html", "curves.png"

LAYERS, WIDTH = 10, 64
EXAMPLES = 256  # that the curvature is measured on: the first of those to train on
TRAINED_ON = 1437  # four fifths
STEPS = 300
SEEDS = 5
# Of the networks tried (LeNets with sigmoids, tanh or ReLU; dense and convolutional ones of 5 to 10 layers)
# this is the plainest of at least eight layers that PyTorch's default weights train at some rate; and of
# 0.01, 0.03, 0.1, 0.3 and 1 this is the rate at which they have the lowest mean loss over five seeds.
LEARNING_RATE = 0.3


def build_network() -> nn.Module:
    """Ten dense layers with tanh between them and PyTorch's default weights."""
    from torch import nn

    pieces: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for number in range(1, LAYERS):
        pieces[f"fc{number}"] = nn.Linear(WIDTH, WIDTH)
        pieces[f"tanh{number}"] = nn.Tanh()
    pieces[f"fc{LAYERS}"] = nn.Linear(WIDTH, 10)
    return nn.Sequential(pieces)


def problem(seed: int = 0) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    """The demo's network, its loss and 256 digits; other commands take it as `hessinit.cli.demo:problem`."""
    import torch

    images, labels = load_digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_network(), torch.nn.CrossEntropyLoss(), (images[:EXAMPLES], labels[:EXAMPLES])


def demo(
    lr: Annotated[
        float,
        typer.Option(callback=options.check_rate, metavar="X", help="The learning rate of every training."),
    ] = LEARNING_RATE,
    seed: Annotated[
        int,
        typer.Option(min=0, max=options.LARGEST_SEED, metavar="N", help="Seed of weights and mini-batches."),
    ] = 0,
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="Where the files go.")] = FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Initialize a deep network twice and train it on real digits.

    Once with PyTorch's default weights, once with weights whose curvature fits the learning rate.

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
    page, picture = folder / PAGE, folder / PICTURE
    with failures_explained("running the demo", "the demo was not finished."):
        demonstration = _compute(lr, seed, as_json)
        if as_json:
            plain = {"kind": "hessinit demonstration", "schema": 4, **to_plain(demonstration)}
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
    """Measure, initialize, train from both, compare over seeds; each is printed when it is known."""

    def say(text: str, result: Any = None) -> None:
        if not mute:
            print_text(text)
            if result is not None:
                print_result(result)

    with progress("Loading torch …"):
        import torch

        from hessinit.training.loop import train_and_track

        # So small a network gains nothing from threads, and on a busy machine they wait for each other.
        torch.set_num_threads(1)
    images, labels = load_digits()
    data = images[:TRAINED_ON], labels[:TRAINED_ON]
    theirs, loss, batch = problem(seed)
    ours, _, _ = problem(seed)
    with progress(f"Measuring the network on {EXAMPLES} digits …"):
        report = hessinit.measure(theirs, loss, batch, seed=seed)
    say(
        f"1. Ten dense layers with tanh and PyTorch's default weights, on {EXAMPLES} handwritten digits. "
        "‖H‖ is the curvature of the loss with respect to a layer's weights.\n",
        report,
    )
    with progress(f"Finding weights for lr = {lr:g} …"):
        initialization = hessinit.initialize_(ours, loss, batch, lr=lr, seed=seed)
    say(f"\n2. New weights, scaled until the curvature fits lr = {lr:g}.\n", initialization)
    say(f"\n3. Training from both: {STEPS} steps of SGD at lr = {lr:g} on {TRAINED_ON:,} digits.\n")
    runs: list[tuple[str, hessinit.Tracking]] = []
    for name, model in (("PyTorch", theirs), ("hessinit", ours)):
        with progress(f"Training {name}'s weights: {STEPS} steps …"):
            tracking = train_and_track(
                model, loss, data, lr=lr, steps=STEPS, examples=EXAMPLES, max_overhead=1.0, seed=seed,
                name=name,
            )  # fmt: skip
        runs.append((name, tracking))
        say(f"{name}: {tracking.verdict}")
    with progress("Five seeds, and two other schemes …"):
        comparison = hessinit.compare(
            build_network, loss, data, schemes=("default", "glorot", "lsuv", "hessinit"),
            learning_rates=(lr,), seeds=range(seed, seed + SEEDS), steps=STEPS, workers=1, progress=False,
        )  # fmt: skip
    say("\n4. Five seeds, and two other schemes; default: the weights that PyTorch draws.\n", comparison)
    return Demonstration(initialization=initialization, runs=runs, comparison=comparison)
