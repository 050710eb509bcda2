"""What a scheme does to every weight: plain data, printed as a table."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hessinit.results.curvature_report import CurvatureReport, read_if_there
from hessinit.results.result import ByName, Plain, read_number, to_plain, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True, kw_only=True)
class PlannedWeight:
    """One weight: its true fans, what lies around it, and the standard deviation that the scheme gives it.

    `fan_in`, `fan_out` and `std` have one entry for each part that leads a life of its own: three for a fused
    qkv, four for an LSTM's gates, one for most. `upstream` and `downstream` name what was found there. The
    standard deviation is that of the drawn entries (for orthogonal weights: the root mean square).
    `variance_correction` makes up for examples that drift apart in deep networks of GELU, SiLU and their
    like. `unchanged` says why a weight is not touched; it has no fans and no std then.
    """

    name: str
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...]
    kind: str = ""
    fan_in: tuple[float, ...] = ()
    fan_out: tuple[float, ...] = ()
    upstream: str = ""
    downstream: str = ""
    norm_follows: bool = False
    closes_residual: bool = False
    gain: float = 1.0
    dropout_factor: float = 1.0
    variance_correction: float = 1.0
    std: tuple[float, ...] = ()
    unchanged: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class SchemePlan(ByName[PlannedWeight]):
    """What a scheme does to each weight, in the order in which they run; `print` shows it as a table.

    `undo()` takes it back where it was carried out.

    >>> weight = PlannedWeight(name="fc1", shape=(16, 64), fan_in=(64.0,), fan_out=(16.0,), std=(0.125,))
    >>> plan = SchemePlan(scheme="lecun", layers=(weight,))
    >>> plan["fc1"].std
    (0.125,)
    """

    scheme: str
    layers: tuple[PlannedWeight, ...]
    distribution: str | None = None
    notes: tuple[str, ...] = ()
    # The way back belongs to the model, not to the data: it is neither compared, shown nor pickled.
    _go_back: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    @property
    def applied(self) -> bool:
        """Whether the weights were written; False for a dry run and for a plan that travelled."""
        return self._go_back is not None

    def undo(self) -> None:
        """Put every weight and bias back, in place and bit for bit, whatever happened to them since."""
        if self._go_back is None:
            raise ValueError(
                "there is nothing to undo: this plan is a dry run, or a copy of the one applied."
            )
        self._go_back()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_go_back": None}

    def to_dict(self) -> dict[str, Plain]:
        """The plan as what strict JSON can hold."""
        shown = [one.name for one in fields(self) if one.name != "_go_back"]
        return {name: to_plain(getattr(self, name)) for name in shown}

    def __repr__(self) -> str:
        state = "applied" if self.applied else "not applied"
        return f"<SchemePlan {self.scheme!r} of {len(self)} weights, {state}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        from hessinit.present.plan_table import render_plan

        return render_plan(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from hessinit.present.plan_table import plan_renderables

        yield from plan_renderables(self, options.max_width)


KIND = "hessinit initialization"
SCHEMA = 1
_OF_THE_MODEL = ("_go_back", "_save_weights")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One look of the search: the norm of `layer` there, and the loss.

    For rule="network", `t` is the logarithm of the gain and `layer` is "network"; for rule="layers", `t` is
    None and `layer` the one farthest from the target.
    """

    t: float | None
    norm: float
    loss: float
    layer: str = "network"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Initialization:
    """What `initialize_` did, and the way back; `print` shows it as a table.

    `scales` holds the factor of each weight on top of the scheme. `before` is None where the weights, or what
    the network gave, were not finite. Reports hold the layers where these are cheap to measure (few outputs)
    or where the rule is about them, else the network alone.

    >>> from hessinit.present.example import example_report
    >>> report = example_report()
    >>> result = Initialization(before=None, after=report, scales={"fc3": 0.5}, target=64.5, rule="network",
    ...                         scheme="keep", scaling="last", converged=True, reason="within 5 %")
    >>> Initialization.from_json(result.to_json()) == result, result.applied
    (True, False)
    """

    before: CurvatureReport | None
    after: CurvatureReport | None
    scales: dict[str, float]
    target: float
    rule: str
    scheme: str
    scaling: str | None = None
    lr: float | None = None
    kappa: float | None = None
    tolerance: float = 0.05
    converged: bool
    reason: str
    measurements: tuple[Measurement, ...] = ()
    plan: SchemePlan | None = None
    notes: tuple[str, ...] = ()
    seed: int = 0
    seconds: float | None = None
    # These belong to the model, not to the data: they are neither compared, shown, stored nor pickled.
    _go_back: Callable[[], None] | None = None
    _save_weights: Callable[[str | os.PathLike[str]], None] | None = field(default=None)

    # Compared in plain form, where nan is the text "nan": a result with a nan in it equals its own copy.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Initialization):
            return NotImplemented
        return bool(self.to_dict() == other.to_dict())

    def __hash__(self) -> int:
        return hash((self.target, self.rule, self.scheme, self.converged, self.seed))

    @property
    def applied(self) -> bool:
        """Whether the weights were written; False for a dry run and for a result that travelled."""
        return self._go_back is not None

    def undo(self) -> None:
        """Put every weight and bias back, in place and bit for bit, whatever happened to them since."""
        if self._go_back is None:
            raise ValueError(
                "there is nothing to undo: this is a dry run, or a copy of the result that was applied."
            )
        self._go_back()

    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Write the model as it is now as safetensors, whole or not at all; tied weights are stored once.

        `safetensors.torch.load_model(model, path)` reads them back.
        """
        if self._save_weights is None:
            raise ValueError(
                "there are no weights to save: this is a dry run, or a copy of the result that was applied. "
                "Run initialize_ with dry_run=False, or save the model itself."
            )
        self._save_weights(path)

    def to_dict(self) -> dict[str, Plain]:
        """The result as what strict JSON can hold; the weights are not in it."""
        reports = {
            name: None if report is None else report.to_dict()
            for name, report in (("before", self.before), ("after", self.after))
        }
        plan = None if self.plan is None else self.plan.to_dict()
        handled = (*_OF_THE_MODEL, "before", "after", "plan")
        shown = [one.name for one in fields(self) if one.name not in handled]
        rest = {name: to_plain(getattr(self, name)) for name in shown}
        return {"kind": KIND, "schema": SCHEMA, **reports, **rest, "plan": plan}

    def to_json(self) -> str:
        """The result as strict JSON; `from_json` gives an equal one back."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result as JSON, whole or not at all; `Initialization.load` reads it."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Initialization:
        """Read what `save` wrote. Only JSON is read, and nothing in it is run."""
        return cls.from_json(Path(path).read_bytes(), source=str(path))

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "the text") -> Initialization:
        """Rebuild a result from what `to_json` gave."""
        try:
            data = json.loads(text)
        except ValueError as problem:
            raise ValueError(
                f"{source} is not JSON ({problem}). Give a file that result.save() wrote."
            ) from problem
        return cls.from_dict(data, source=source)

    @classmethod
    def from_dict(cls, data: Plain, *, source: str = "the data") -> Initialization:
        """Rebuild a result; unknown keys are ignored."""
        if not isinstance(data, dict) or data.get("kind") != KIND:
            raise ValueError(f"{source} is not a {KIND}. Give a file that result.save() wrote.")
        if data.get("schema") != SCHEMA:
            raise ValueError(
                f"{source} has schema {data.get('schema')!r}, and this hessinit reads {SCHEMA}. Upgrade with "
                "`pip install --upgrade hessinit`, or initialize again."
            )
        try:
            return cls(
                before=read_if_there(CurvatureReport.from_dict, data["before"]),
                after=read_if_there(CurvatureReport.from_dict, data["after"]),
                scales={str(name): read_number(factor) for name, factor in data["scales"].items()},
                target=read_number(data["target"]),
                rule=str(data["rule"]),
                scheme=str(data["scheme"]),
                scaling=read_if_there(str, data["scaling"]),
                lr=read_if_there(read_number, data["lr"]),
                kappa=read_if_there(read_number, data["kappa"]),
                tolerance=read_number(data["tolerance"]),
                converged=bool(data["converged"]),
                reason=str(data["reason"]),
                measurements=tuple(map(_read_measurement, data["measurements"])),
                plan=read_if_there(_read_plan, data["plan"]),
                notes=tuple(map(str, data["notes"])),
                seed=int(data["seed"]),
                seconds=read_if_there(read_number, data["seconds"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as problem:
            what = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
            raise ValueError(
                f"{source} is not a whole initialization: {what}. Was the file edited or cut?"
            ) from problem

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the result as one web page that needs nothing else: before, after, rate and search."""
        from hessinit.present.page.initialization import initialization_page
        from hessinit.present.page.render import render_page

        write_text(path, render_page(initialization_page(self)))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the norms before and after over depth, with the target; on `ax` or a new figure."""
        from hessinit.present.initialization_figure import draw_initialization

        return draw_initialization(self, ax)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(_OF_THE_MODEL)}

    def __repr__(self) -> str:
        state = "applied" if self.applied else "not applied"
        met = "met" if self.converged else "not met"
        return f"<Initialization by {self.scheme!r} to ‖H‖ = {self.target:.3g} ({self.rule}): {met}, {state}>"

    def __str__(self) -> str:
        from hessinit.present.initialization_table import render_initialization

        return render_initialization(self)

    def _repr_html_(self) -> str:
        from hessinit.present.html import render_initialization_fragment

        return render_initialization_fragment(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from hessinit.present.initialization_table import initialization_renderables

        yield from initialization_renderables(self, options.max_width)


def _read_measurement(data: Plain) -> Measurement:
    return Measurement(
        t=read_if_there(read_number, data["t"]),
        norm=read_number(data["norm"]),
        loss=read_number(data["loss"]),
        layer=str(data["layer"]),
    )


def _read_plan(data: Plain) -> SchemePlan:
    return SchemePlan(
        scheme=str(data["scheme"]),
        distribution=read_if_there(str, data["distribution"]),
        layers=tuple(map(_read_planned, data["layers"])),
        notes=tuple(map(str, data["notes"])),
    )


def _read_planned(data: Plain) -> PlannedWeight:
    known = {one.name for one in fields(PlannedWeight)}
    read: dict[str, Any] = {name: value for name, value in data.items() if name in known}
    for name, value in read.items():
        if isinstance(value, list):
            read[name] = tuple(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            read[name] = float(value)
    return PlannedWeight(**read)
