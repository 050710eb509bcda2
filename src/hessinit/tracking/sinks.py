"""Scalars for TensorBoard, Weights & Biases, or any function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from hessinit.errors import ProblemError
from hessinit.results.track_record import TrackedPoint

Sink = Callable[[dict[str, float], int], object]


def find_sinks(log_to: Any) -> list[Sink]:
    """What each of `log_to` is, by what it can do; "auto" is the active run of W&B, whenever there is one."""
    if log_to is None:
        return []
    if isinstance(log_to, str) and log_to != "auto":
        raise ProblemError(
            f"log_to={log_to!r} is unknown; pass 'auto', a SummaryWriter, a W&B run, a function of a dict "
            "and a step, or several of them."
        )
    many = isinstance(log_to, Iterable) and not isinstance(log_to, str) and not _is_sink(log_to)
    return [_sink(one) for one in (log_to if many else [log_to])]


def scalars(point: TrackedPoint) -> dict[str, float]:
    """The numbers of a point by name, those that there are."""
    named = {
        "norm": point.norm,
        "lr_times_norm": point.lr_times_norm,
        "edge": point.lr_over_limit,
        "loss": point.loss,
        **{f"layers/{name}": norm for name, norm in point.layers.items()},
    }
    return {f"hessinit/{name}": value for name, value in named.items() if value is not None}


def _is_sink(one: Any) -> bool:
    return any(callable(getattr(one, name, None)) for name in ("add_scalar", "log")) or callable(one)


def _sink(one: Any) -> Sink:
    if isinstance(one, str) and one == "auto":
        return _ActiveRun()
    if callable(getattr(one, "add_scalar", None)):
        return _to_tensorboard(one)
    if callable(getattr(one, "log", None)):
        return _to_wandb(one)
    if callable(one):
        return one
    raise ProblemError(
        f"log_to holds a {type(one).__name__}; it takes 'auto', a SummaryWriter (add_scalar), a W&B run "
        "(log), or a function of a dict and a step."
    )


def _to_tensorboard(writer: Any) -> Sink:
    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log


def _to_wandb(run: Any) -> Sink:
    """With an axis of its own, in the row that is open: W&B drops what comes with a step before that one.

    A new row is begun only for a second point in the same one, so that the user's own steps fit in later.
    """
    if callable(getattr(run, "define_metric", None)):
        run.define_metric("hessinit/step")
        run.define_metric("hessinit/*", step_metric="hessinit/step")

    rows: list[int] = []

    def log(values: dict[str, float], step: int) -> None:
        row = run.step
        rows[:] = [row + 1 if row in rows else row]
        run.log({**values, "hessinit/step": step}, step=rows[0])

    return log


class _ActiveRun:
    """The run of W&B that is active when a point comes, if any."""

    def __init__(self) -> None:
        self._run: Any = None
        self._log: Sink | None = None

    def __call__(self, values: dict[str, float], step: int) -> None:
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            return
        if run is not self._run:
            self._run, self._log = run, _to_wandb(run)
        assert self._log is not None
        self._log(values, step)
