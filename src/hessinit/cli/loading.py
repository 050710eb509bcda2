"""The user's problem, ready to be measured: torch is seeded, the file run, the model on its device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer

from hessinit.cli.failures import stop
from hessinit.cli.interrupts import raise_when_interrupted
from hessinit.problem_file import LoadedProblem, Place, load_problem


def load_ready(place: Place, *, seed: int | None, device: str | None, threads: int | None) -> LoadedProblem:
    """Seed what the file may draw from, load the problem, and move the model; a batch follows the model."""
    prepare_torch(seed or 0, device, threads)
    raise_when_interrupted()
    loaded = load_problem(place)
    if device is not None and hasattr(loaded.model, "to"):
        loaded.model.to(device)
    return loaded


def prepare_torch(seed: int, device: str | None, threads: int | None) -> None:
    """Seed what a file may draw from, so that a command repeats itself; refuse a wrong device."""
    import random

    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002 - the user's code may draw from the old global state
    torch.manual_seed(seed)
    if threads is not None:
        torch.set_num_threads(threads)
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as failure:
        reason = str(failure).strip().splitlines()[0].rstrip(".")
        stop(f"--device {device} cannot be used here: {reason}.")


def take_shared(loaded: LoadedProblem, shared: Iterable[str], problem: str) -> dict[str, Any]:
    """Of what a problem says to `measure`, what means the same to another verb; the rest is named as unused.

    Of both curvatures such a verb takes its own default: it goes by one number.
    """
    taken = {name: value for name, value in loaded.keywords.items() if name in shared}
    if taken.get("curvature") == "both":
        del taken["curvature"]
    name_unused(problem, [name for name in loaded.keywords if name not in taken])
    return taken


def name_unused(problem: str, names: Iterable[str]) -> None:
    """Say on stderr which keyword arguments of a problem this command does not look at."""
    listed = ", ".join(names)
    if listed:
        typer.echo(f"{problem} also gives {listed}, which only hessinit measure looks at.", err=True)
