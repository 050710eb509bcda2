"""What a tracker records: training losses, the file of JSON lines, and scalars for TensorBoard or W&B."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.results.result import Plain, to_plain, write_text
from hessinit.results.track_record import (
    END,
    MOST_LOSSES,
    RESUMED,
    TrackedPoint,
    Tracking,
    are_lines,
)

Sink = Callable[[dict[str, float], int], object]


class Losses:
    """At most a thousand training losses, evenly spread over the steps.

    A loss on a GPU is read only when it is needed: reading it at every step would make training wait.
    """

    def __init__(self, earlier: tuple[tuple[int, float], ...] = ()) -> None:
        self._kept: list[tuple[int, float | Tensor]] = list(earlier)
        self._written = earlier[-1][0] if earlier else -1
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

    def drop_after(self, step: int) -> bool:
        """Drop the losses of later steps; returns whether there were any."""
        kept = [pair for pair in self._kept if pair[0] <= step]
        drops = len(kept) < len(self._kept)
        if drops:
            self._latest = None
        self._kept, self._written = kept, min(self._written, step)
        return drops

    @property
    def latest(self) -> float | None:
        """The last loss given, whether it was kept or not."""
        return None if self._latest is None else float(self._latest)

    def all(self) -> tuple[tuple[int, float], ...]:
        self._kept = [(step, float(loss)) for step, loss in self._kept]
        return tuple((step, float(loss)) for step, loss in self._kept)

    def unwritten(self) -> dict[str, Plain]:
        """The losses since the last call, as fields of a line."""
        found = [(step, loss) for step, loss in self.all() if step > self._written]
        if found:
            self._written = found[-1][0]
        return {"losses": to_plain(found), "stride": self.stride}


def _read_loss(loss: object) -> float | Tensor:
    if isinstance(loss, Tensor):
        if loss.is_complex() or loss.dtype == torch.bool:
            raise ProblemError(
                f"the loss given to step() has dtype {loss.dtype}; it must be a real number, or left out."
            )
        if loss.numel() != 1:
            raise ProblemError(
                f"the loss given to step() has shape {tuple(loss.shape)}; it must be a single number, such "
                "as loss.mean(), or left out."
            )
        # A copy: the loss may be divided in place afterwards, or live in a buffer that is used again.
        return loss.detach().clone() if loss.device.type != "cpu" else float(loss.detach())
    try:
        if isinstance(loss, str | bool):
            raise TypeError
        return float(loss)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        shown = f"{loss!r}" if isinstance(loss, str | bool) else f"a {type(loss).__name__}"
        raise ProblemError(
            f"the loss given to step() is {shown}; it must be a number, or left out."
        ) from None


class TrackLog:
    """A file of JSON lines: a header, a line for each point, and a line at the end.

    The file is opened for every line, and each line is with the operating system before training goes on, so
    that a killed run loses nothing. A line that cannot be written precedes the next one: the disk may be full
    only for a while. The file is created with the first line, after an earlier tracker's file of that name
    has been renamed to `NAME.bak`; with `resume` the run continues in it.
    """

    def __init__(self, path: str | os.PathLike[str], resume: bool) -> None:
        self.path = check_path(path)
        self._place = self.path.absolute()  # training may change the working directory
        self._header = self._unwritten = ""
        self.earlier: Tracking | None = None
        self._replaces = self._place.exists()
        if self._replaces and resume:
            self._replaces = False
            try:
                self.earlier = Tracking.from_json(self._place.read_bytes(), source=str(path))
            except ValueError as problem:
                raise ProblemError(f"cannot resume: {problem}") from problem
        elif self._replaces and not are_lines(self._place.read_bytes()):
            raise ProblemError(
                f"path={str(path)!r} exists and is not a tracker's file, so it is not overwritten; give "
                "another path, or None for no file."
            )

    def begin(self, record: Tracking) -> None:
        """Set the header. A resumed file is rewritten under it, whole or not at all."""
        later = ("points", "losses", "seconds", "spent")
        facts = {name: value for name, value in record.to_dict().items() if name not in later}
        self._header = json.dumps({**facts, "lines": True}, allow_nan=False) + "\n"
        if self.earlier is not None:
            self.rewrite(record.points, Losses(record.losses), record.seconds)

    def rewrite(self, points: Iterable[TrackedPoint], losses: Losses, seconds: float) -> None:
        """Replace the content by these points and losses."""
        none = {"losses": [], "stride": losses.stride}
        lines = [*({**to_plain(point), **none} for point in points)]
        state = {
            "line": RESUMED,
            "seconds": seconds,
            "losses": to_plain(losses.all()),
            "stride": losses.stride,
        }
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in (*lines, state))
        write_text(self._place, self._header + text)
        self._unwritten = ""

    def add(self, point: TrackedPoint, losses: Losses) -> None:
        self._append({**to_plain(point), **losses.unwritten()})

    def end(self, facts: Mapping[str, Plain], losses: Losses) -> None:
        self._append({"line": END, **facts, **losses.unwritten()})

    @property
    def is_behind(self) -> bool:
        """Whether there are lines that could not be written yet."""
        return bool(self._unwritten)

    def _append(self, line: Mapping[str, Plain]) -> None:
        self._unwritten += json.dumps(line, allow_nan=False) + "\n"
        if self._replaces:
            self._place.replace(self._place.with_name(self._place.name + ".bak"))
            self._replaces = False
        if not self._place.exists():  # also where the file was removed in the meantime
            write_text(self._place, self._header + self._unwritten)
        else:
            with self._place.open("ab", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                content = self._unwritten.encode()
                try:
                    while content:
                        content = content[file.write(content) :]
                except OSError:
                    file.truncate(size)  # half a line would spoil the next one
                    raise
        self._unwritten = ""


def check_path(path: str | os.PathLike[str]) -> Path:
    """The name of a file in a folder that exists."""
    try:
        wanted = Path(os.fspath(path))
    except TypeError:
        raise ProblemError(
            f"path is a {type(path).__name__}; it must be the name of a file, such as 'curvature.jsonl', or "
            "None for no file."
        ) from None
    if wanted.exists() and not wanted.is_file():
        what = "is a folder; give the name of a file in it" if wanted.is_dir() else "exists and is not a file"
        raise ProblemError(f"path={str(path)!r} {what}, or None for no file.")
    if not wanted.parent.is_dir():
        raise ProblemError(
            f"path={str(path)!r}: the folder {wanted.parent} does not exist. Create it first, or pass "
            "path=None for no file."
        )
    return wanted


def find_sinks(log_to: Any) -> list[Sink]:
    """The functions that scalars are passed to; "auto" is the active W&B run, as long as there is one."""
    if log_to is None:
        return []
    if isinstance(log_to, str) and log_to != "auto":
        raise ProblemError(
            f"log_to={log_to!r} is unknown; pass 'auto', a SummaryWriter, a W&B run, a function of a dict "
            "and a step, or several of them."
        )
    is_one = any(callable(getattr(log_to, name, None)) for name in ("add_scalar", "log", "__call__"))
    many = isinstance(log_to, Iterable) and not isinstance(log_to, str) and not is_one
    return [_sink(one) for one in (log_to if many else [log_to])]


def scalars(point: TrackedPoint) -> dict[str, float]:
    """The numbers of a point by name; what is not known is left out."""
    named = {
        "norm": point.norm,
        "lr_times_norm": point.lr_times_norm,
        "lr_over_limit": point.lr_over_limit,
        "loss": point.loss,
        **{f"layers/{name}": norm for name, norm in point.layers.items()},
    }
    return {f"hessinit/{name}": value for name, value in named.items() if value is not None}


def _sink(one: Any) -> Sink:
    if isinstance(one, str) and one == "auto":
        return _to_active_run()
    if callable(getattr(one, "add_scalar", None)):
        return lambda values, step: [one.add_scalar(name, value, step) for name, value in values.items()]
    if callable(getattr(one, "log", None)):
        return _to_wandb(one)
    if callable(one):
        return one
    raise ProblemError(
        f"log_to holds a {type(one).__name__}; it takes 'auto', a SummaryWriter (add_scalar), a W&B run "
        "(log), or a function of a dict and a step."
    )


def _to_wandb(run: Any) -> Sink:
    """Log into the current W&B row, with a step axis of our own: W&B drops values for earlier steps.

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


def _to_active_run() -> Sink:
    """Log to the W&B run that is active at the time, if any."""
    known: list[tuple[Any, Sink]] = []

    def log(values: dict[str, float], step: int) -> None:
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is not None:
            if not known or known[0][0] is not run:
                known[:] = [(run, _to_wandb(run))]
            known[0][1](values, step)

    return log
