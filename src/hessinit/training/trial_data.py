"""The mini-batches of trials: fresh ones from the user's data, and those that only score."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader

from hessinit.errors import ProblemError
from hessinit.problem.batches import Batch, read_batches
from hessinit.problem.preserve import untouched_random_state, untouched_sources
from hessinit.problem.ranks import lockstep_ranks
from hessinit.training.loop import read_data

# Batches are held out if there are at least this many; then one in this many is.
HELD_OUT_ONE_IN = 5


class TrialData(NamedTuple):
    """Batches to train on in turn, how many of them differ, and those that only score.

    One batch alone tells who survives, not who learns.
    """

    batches: tuple[Batch, ...]
    different: int
    held_out: tuple[Batch, ...] = ()


NO_HORIZON = "steps= has no effect without data=: trials on one batch have a length of their own."
ONE_BATCH = "data= holds one batch, so trials took halves of the batch that was measured."


def note_trial_data(data: TrialData | None, steps: int | None) -> tuple[str, ...]:
    """Return what the trials could not take into account."""
    if data is None:
        return (NO_HORIZON,) * (steps is not None)
    return (ONE_BATCH,) * (data.different == 1)


def read_trial_data(data: Any, batch: Any, steps: int, seed: int = 0) -> TrialData:
    """Read the batches for `steps` steps, at most as many from a loader; the seed decides which.

    `data` is a DataLoader, a list of ready batches, or `(inputs, targets)` with all examples, which
    are cut into batches of the size of `batch`. Where there are at least five batches, but fewer
    than steps, a fifth of them is held out for the score.
    """
    if lockstep_ranks() is not None:
        raise ProblemError(
            "data= asks for trials on fresh mini-batches, and a sharded model is tried on its "
            "batch; leave it out."
        )
    _check_read_again(data)
    read = read_data(data, 1, steps)
    if not read.ready:
        read = replace(read, batch_size=min(read_batches(batch)[0][1].size, read.examples))
    held_out = tuple[Batch, ...]()
    if HELD_OUT_ONE_IN <= read.different < steps:
        read, scoring = read.hold_out(read.different // HELD_OUT_ONE_IN, seed)
        held_out = scoring.parts
    batches = tuple(itertools.islice(read.minibatches(seed), steps))
    return TrialData(batches, min(read.different, steps), held_out)


def _check_read_again(data: Any) -> None:
    """Raise ProblemError if the data can be read only once: training would find them used up."""
    source = data.dataset if isinstance(data, DataLoader) else data
    if not hasattr(source, "__iter__") or isinstance(source, (Sequence, Tensor)):
        return
    with untouched_random_state(), untouched_sources(source):
        is_used_up = iter(source) is iter(source)
    if is_used_up:
        name = "data" if source is data else "the dataset of data"
        raise ProblemError(
            f"{name}, a {type(source).__name__}, can be read only once: the trials would use up "
            "batches that training needs. Pass a DataLoader over a dataset that can be read again, "
            "or a list of batches."
        )
