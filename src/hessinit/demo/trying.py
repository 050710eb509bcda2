"""One try of the demo: a start, its training on four fifths of the digits, the test on the rest."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

from hessinit.demo.network import EXAMPLES, TRAINED_ON, build_network
from hessinit.digits import load_digits
from hessinit.errors import ConvergenceWarning
from hessinit.init.apply_scheme import apply_scheme_
from hessinit.init.initialize import initialize_
from hessinit.present.demonstration import STARTS, Story, Try
from hessinit.results.comparison import window
from hessinit.results.initialization import Initialization
from hessinit.results.track_record import Tracking
from hessinit.training.train_and_track import train_and_track

STEPS = 300
BATCH_SIZE = 64
SEEDS = 5
TRACKED_EVERY = 10


def prepare(start: str, lr: float, seed: int) -> tuple[nn.Module, Initialization | None]:
    """A new network with the weights of that start; what `initialize_` did, where it made them."""
    model, sample = build_network(seed), first_digits()
    if start == "hessinit":
        with warnings.catch_warnings():
            # The result says that a target was out of reach, and so does what is printed of it.
            warnings.simplefilter("ignore", ConvergenceWarning)
            return model, initialize_(model, nn.CrossEntropyLoss(), sample, lr=lr, seed=seed)
    if start != "default":
        inputs = sample[0] if start == "lsuv" else None
        apply_scheme_(model, start, sample=inputs, generator=torch.Generator().manual_seed(seed))
    return model, None


def train(
    model: nn.Module,
    start: str,
    lr: float,
    seed: int,
    every: int | None = None,
    progress: Callable[[int, float], object] | None = None,
) -> tuple[Tracking, Try]:
    """Train the network in place; the same mini-batches for every start of a seed.

    The curvature is followed `every` so many steps; without, at the beginning and the end.
    """
    images, labels = load_digits()
    tracking = train_and_track(
        model, nn.CrossEntropyLoss(), (images[:TRAINED_ON], labels[:TRAINED_ON]), lr=lr, steps=STEPS,
        batch_size=BATCH_SIZE, every=every or STEPS, examples=EXAMPLES, max_overhead=1.0, seed=seed,
        name=STARTS[start], progress=progress,
    )  # fmt: skip
    losses = [loss for _, loss in tracking.losses]
    with torch.no_grad():
        right = model(images[TRAINED_ON:]).argmax(dim=1) == labels[TRAINED_ON:]
    tried = Try(
        start=start,
        seed=seed,
        first_loss=losses[0],
        final_loss=statistics.fmean(losses[-window(STEPS) :]),
        accuracy=right.float().mean().item(),
    )
    return tracking, tried


def try_others(done: list[Try], lr: float, seed: int) -> Iterator[Try]:
    """Every start with every seed that is not among those `done`."""
    known = {(one.start, one.seed) for one in done}
    for other in range(seed, seed + SEEDS):
        for start in STARTS:
            if (start, other) not in known:
                model, _ = prepare(start, lr, other)
                yield train(model, start, lr, other)[1]


def gather(tries: list[Try], lr: float, seed: int) -> Story:
    """The tries as the story to tell."""
    held_out = len(load_digits()[1]) - TRAINED_ON
    return Story(
        lr=lr, seed=seed, steps=STEPS, batch_size=BATCH_SIZE, trained_on=TRAINED_ON, held_out=held_out,
        tries=tuple(tries),
    )  # fmt: skip


def first_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """What the curvature is measured on."""
    images, labels = load_digits()
    return images[:EXAMPLES], labels[:EXAMPLES]
