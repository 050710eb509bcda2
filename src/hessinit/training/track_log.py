"""What a tracker records: training losses, a file of JSON lines, and scalars for loggers."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.results.result import Plain, to_plain, write_text
from hessinit.results.track_record import MOST_LOSSES, TrackedPoint, Tracking, are_lines

Sink = Callable[[dict[str, float], int], object]


class Losses:
    """At most a thousand training losses, evenly spread over the steps.

    A loss on a GPU is read only when it is needed: reading it at every step would make training
    wait.
    """

    def __init__(self, earlier: tuple[tuple[int, float], ...] = ()) -> None:
        self._kept: list[tuple[int, float | Tensor]] = list(earlier)
        common = math.gcd(*(step for step, _ in earlier))
        # As many as this were thinned already, by powers of two.
        self.stride = common & -common if len(earlier) >= MOST_LOSSES // 2 else 1
        self._latest: float | Tensor | None = None

    def add(self, step: int, loss: float | Tensor) -> None:
        self._latest = _read_loss(loss)
        if step % self.stride == 0:
            self._kept.append((step, self._latest))
        if len(self._kept) > MOST_LOSSES:
            self.stride *= 2
            self._kept = [pair for pair in self._kept if pair[0] % self.stride == 0]

    def drop_after(self, step: int) -> None:
        self._kept = [pair for pair in self._kept if pair[0] <= step]
        self._latest = None

    @property
    def latest(self) -> float | None:
        """The last loss given, whether it was kept or not."""
        return None if self._latest is None else float(self._latest)

    def all(self) -> tuple[tuple[int, float], ...]:
        self._kept = [(step, float(loss)) for step, loss in self._kept]
        return tuple((step, float(loss)) for step, loss in self._kept)


def _read_loss(loss: Any) -> float | Tensor:
    if isinstance(loss, Tensor):
        # A copy: the loss may be divided in place afterwards, or live in a buffer that is used
        # again.
        loss = loss.detach().clone()
        if loss.device.type != "cpu" and loss.numel() == 1:
            return loss
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        raise ProblemError(
            f"the loss given to step() is {loss!r:.60}; it must be a single real number, such as "
            "loss.mean(), or left out."
        ) from None


class TrackLog:
    """A file of JSON lines: a header, a line for each point, and a line at the end.

    Each line is with the operating system before training goes on, so that a killed run loses
    nothing. A file that is new, resumed, removed, or cut by a full disk is written as a whole with
    the next line. An earlier tracker's file of that name is renamed to `NAME.bak`, or continued
    with `resume`.
    """

    def __init__(self, path: Any, resume: bool) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ProblemError(
                f"path is a {type(path).__name__}; it must be the name of a file, or None."
            )
        self.path = Path(path)
        self._place = self.path.absolute()  # training may change the working directory
        if self._place.is_dir() or not self._place.parent.is_dir():
            raise ProblemError(
                f"path={str(path)!r} must be a file in a folder that exists; create it, or pass "
                "None."
            )
        self.earlier: Tracking | None = None
        self._is_whole = False  # whether the file holds all that was tracked so far
        self._written = -1  # the step of the last loss in the file
        exists = self._place.exists()
        self._replaces = exists and not resume
        if exists and resume:
            try:
                self.earlier = Tracking.from_json(self._place.read_bytes(), source=str(path))
            except ValueError as problem:
                raise ProblemError(f"cannot resume: {problem}") from problem
        elif exists and not are_lines(self._place.read_bytes()):
            raise ProblemError(
                f"path={str(path)!r} exists and is not a tracker's file, so it is not overwritten; "
                "give another path, or None for no file."
            )

    def add(
        self,
        line: Mapping[str, Plain],
        losses: Losses,
        record: Tracking,
        before: Sequence[TrackedPoint],
    ) -> None:
        """Append a line with the losses since the last; `before` are the points of earlier ones."""
        appends = self._is_whole and self._place.exists()
        self._is_whole = False
        recorded = losses.all()
        new = [pair for pair in recorded if not appends or pair[0] > self._written]
        lines = [{**line, "losses": to_plain(new), "stride": losses.stride}]
        if not appends:
            header = {**record.to_dict(), "lines": True}
            del header["points"], header["losses"]
            earlier = [{**to_plain(point), "losses": [], "stride": 1} for point in before]
            lines = [header, *earlier, *lines]
        text = "".join(json.dumps(fields, allow_nan=False) + "\n" for fields in lines)
        if appends:
            with self._place.open("ab") as file:
                file.write(text.encode())
        else:
            if self._replaces:
                self._place.replace(self._place.with_name(self._place.name + ".bak"))
                self._replaces = False
            write_text(self._place, text)
        self._is_whole = True
        self._written = recorded[-1][0] if recorded else -1

    def write_anew(self) -> None:
        """Write the whole file with the next line: what it holds is not what was tracked."""
        self._is_whole = False


def scalars(point: TrackedPoint) -> dict[str, float]:
    """Return the numbers of a point by name, but for unknown ones."""
    named = {
        "norm": point.norm,
        "lr_times_norm": point.lr_times_norm,
        "lr_over_limit": point.lr_over_limit,
        "loss": point.loss,
        **{f"layers/{name}": norm for name, norm in point.layers.items()},
    }
    return {f"hessinit/{name}": value for name, value in named.items() if value is not None}


def find_sinks(log_to: Any) -> list[Sink]:
    """Return the functions that scalars are passed to; "auto" is the W&B run that is active."""
    if log_to is None:
        return []
    if isinstance(log_to, list | tuple):
        return [sink for logger in log_to for sink in find_sinks(logger)]
    if isinstance(log_to, str) and log_to == "auto":
        return [_WandbSink()]
    if callable(getattr(log_to, "add_scalar", None)):
        return [partial(_add_scalars, log_to)]
    if callable(getattr(log_to, "log", None)):
        return [_WandbSink(log_to)]
    if callable(log_to):
        return [log_to]
    shown = repr(log_to) if isinstance(log_to, str) else f"a {type(log_to).__name__}"
    raise ProblemError(
        f"log_to holds {shown}; it takes 'auto', a SummaryWriter (add_scalar), a W&B run (log), a "
        "function of a dict and a step, or several of them."
    )


def _add_scalars(writer: Any, values: dict[str, float], step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)


class _WandbSink:
    """Logs into the current row of a W&B run (by default of the one that is active at the time).

    With its own step axis, as W&B drops earlier steps; only a second point in the same row begins a
    new one.
    """

    def __init__(self, run: Any = None) -> None:
        self._chosen_run = run
        self._row = -1
        self._last_run: Any = None

    def __call__(self, values: dict[str, float], step: int) -> None:
        run = self._chosen_run or getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            return
        is_new = run is not self._last_run
        if is_new:
            run.define_metric("hessinit/step")
            run.define_metric("hessinit/*", step_metric="hessinit/step")
        self._row = run.step + (not is_new and run.step == self._row)
        self._last_run = run
        run.log({**values, "hessinit/step": step}, step=self._row)
