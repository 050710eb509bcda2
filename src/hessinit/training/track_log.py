"""What a tracker records: training losses, the file of JSON lines, and scalars for TensorBoard or W&B."""

from __future__ import annotations

import contextlib
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
from hessinit.results.track_record import END, MOST_LOSSES, RESUMED, TrackedPoint, Tracking, are_lines

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


def _read_loss(loss: Any) -> float | Tensor:
    kind = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        kind = f"a tensor of {loss.dtype} and shape {tuple(loss.shape)}"
        if loss.numel() == 1 and not loss.is_complex() and loss.dtype != torch.bool:
            # A copy: the loss may be divided in place afterwards, or live in a buffer that is used again.
            return loss.detach().clone() if loss.device.type != "cpu" else float(loss.detach())
    elif not isinstance(loss, str | bool):
        with contextlib.suppress(TypeError, ValueError):
            return float(loss)
    raise ProblemError(
        f"the loss given to step() is {kind}; it must be a single real number, such as loss.mean(), or left "
        "out."
    )


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
        lines = [{**to_plain(point), "losses": [], "stride": losses.stride} for point in points]
        everything = {"losses": to_plain(losses.all()), "stride": losses.stride}
        lines.append({"line": RESUMED, "seconds": seconds, **everything})
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        write_text(self._place, self._header + text)
        self._unwritten = ""

    def add(self, point: TrackedPoint, losses: Losses) -> None:
        self._append({**to_plain(point), **losses.unwritten()})

    def end(self, tracking: Tracking, losses: Losses) -> None:
        names = ("notes", "seconds", "spent", "name", "initialization")
        facts = {name: value for name, value in tracking.to_dict().items() if name in names}
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


def check_path(path: Any) -> Path:
    """The name of a file in a folder that exists."""
    if not isinstance(path, str | os.PathLike):
        raise ProblemError(
            f"path is a {type(path).__name__}; it must be the name of a file, such as 'curvature.jsonl', or "
            "None for no file."
        )
    wanted = Path(path)
    if wanted.exists() and not wanted.is_file():
        raise ProblemError(f"path={str(path)!r} exists and is not a file; give another name, or None.")
    if not wanted.parent.is_dir():
        raise ProblemError(
            f"path={str(path)!r}: the folder {wanted.parent} does not exist. Create it first, or pass "
            "path=None for no file."
        )
    return wanted


def scalars(point: TrackedPoint) -> dict[str, float]:
    """The numbers of a point by name; what is not known is left out."""
    named = {
        "norm": point.norm, "lr_times_norm": point.lr_times_norm, "lr_over_limit": point.lr_over_limit,
        "loss": point.loss, **{f"layers/{name}": norm for name, norm in point.layers.items()},
    }  # fmt: skip
    return {f"hessinit/{name}": value for name, value in named.items() if value is not None}


def find_sinks(log_to: Any) -> list[Sink]:
    """The functions that scalars are passed to; "auto" is the active W&B run, as long as there is one."""
    if log_to is None:
        return []
    is_one = isinstance(log_to, str) or any(callable(getattr(log_to, name, None)) for name in _SINKS)
    return [_sink(one) for one in (log_to if isinstance(log_to, Iterable) and not is_one else [log_to])]


def _sink(one: Any) -> Sink:
    if isinstance(one, str) and one == "auto":
        return _WandbSink()
    for method, make in _SINKS.items():
        if callable(getattr(one, method, None)):
            return make(one)
    shown = repr(one) if isinstance(one, str) else f"a {type(one).__name__}"
    raise ProblemError(
        f"log_to holds {shown}; it takes 'auto', a SummaryWriter (add_scalar), a W&B run (log), a function "
        "of a dict and a step, or several of them."
    )


class _WandbSink:
    """Logs into the current row of a W&B run (by default of the one that is active at the time).

    With a step axis of our own: W&B drops values for earlier steps. A new row is begun only for a second
    point in the same one, so that the user's own steps fit in later.
    """

    def __init__(self, run: Any = None) -> None:
        self._given, self._row = run, -1
        self._known: Any = None

    def __call__(self, values: dict[str, float], step: int) -> None:
        run = self._given or getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            return
        if run is not self._known and callable(getattr(run, "define_metric", None)):
            run.define_metric("hessinit/step")
            run.define_metric("hessinit/*", step_metric="hessinit/step")
        self._row = run.step + (run is self._known and run.step == self._row)
        self._known = run
        run.log({**values, "hessinit/step": step}, step=self._row)


def _to_writer(writer: Any) -> Sink:
    return lambda values, step: [writer.add_scalar(name, value, step) for name, value in values.items()]


# By the method that tells them apart: TensorBoard's SummaryWriter, a W&B run, a function.
_SINKS: dict[str, Callable[[Any], Sink]] = {
    "add_scalar": _to_writer,
    "log": _WandbSink,
    "__call__": lambda function: function,
}
