"""What a scheme does to every weight: plain data, printed as a table."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from hessinit.report.by_name import ByName
from hessinit.report.json_form import Plain, to_plain

if TYPE_CHECKING:
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
