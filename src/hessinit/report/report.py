"""The whole report: every layer, the network, and what was done to learn it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hessinit.report.atomic import write_text
from hessinit.report.by_name import ByName
from hessinit.report.json_form import Plain, read_number, to_plain
from hessinit.report.layer import MATRICES, ONLY_BOUNDED, LayerCurvature, check_choice
from hessinit.report.reading import read_if_there, read_layer
from hessinit.report.schema import KIND, SCHEMA, to_present_schema

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console, ConsoleOptions, RenderResult

    from hessinit.report.advice import LearningRateAdvice

# `present` is imported inside the methods only: it imports this module, and measuring needs none of it.


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CurvatureReport(ByName[LayerCurvature]):
    """The curvature of every layer and of the network, with how far to trust it and what it cost.

    It is plain data: it needs no model and no torch, saves to JSON and loads back equal.

    >>> from hessinit.present.example import example_report
    >>> report = example_report()
    >>> report["fc3"].norm, report.network.norm, report.learning_rate
    (64.0, 64.5, 0.015503875968992248)
    >>> CurvatureReport.from_json(report.to_json()) == report
    True
    """

    schema: ClassVar[int] = SCHEMA

    layers: tuple[LayerCurvature, ...]
    network: LayerCurvature
    curvature: str
    loss: float
    examples: int
    batches: int = 1
    tolerance: float
    seed: int
    engine: str
    engine_reason: str = ""
    seconds: float | None = None
    gradients: float | None = None
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("curvature", self.curvature, (*MATRICES, "both"))

    # Compared in plain form, where nan is the text "nan": a report with a nan in it equals its own copy.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CurvatureReport):
            return NotImplemented
        return bool(self.to_dict() == other.to_dict())

    def __hash__(self) -> int:
        return hash((self.layers, self.network, self.curvature, self.examples, self.seed))

    @property
    def learning_rate(self) -> float:
        """γ* = 1/‖H‖, the step of the largest guaranteed decrease; inf when ‖H‖ is 0, 0 when it is inf.

        Without `network_measured`, ‖H‖ is a lower bound, and this an upper one: it guarantees nothing.
        """
        return self.stable_learning_rate / 2

    @property
    def stable_learning_rate(self) -> float:
        """2/‖H‖, above which gradient descent of the measured weights leaves a bowl of this curvature."""
        return 2 / self.network.norm if self.network.norm else math.inf

    @property
    def sharpest(self) -> LayerCurvature:
        """The layer with the largest norm; nan counts as the largest."""
        return max(self._measured(), key=_by_norm)

    @property
    def flattest(self) -> LayerCurvature:
        """The layer with the smallest norm."""
        return min(self._measured(), key=_by_norm)

    @property
    def network_measured(self) -> bool:
        """Whether the network was measured; with network=False its norm is only bounded by the layers'."""
        return self.network.top.reason != ONLY_BOUNDED

    @property
    def converged(self) -> bool:
        """Whether every norm asked for reached the tolerance; for curvature="both", Gauss-Newton's too."""
        rows = (*self.layers, self.network) if self.network_measured else self.layers
        approximations = [row.approximation for row in rows if row.approximation is not None]
        return all(estimate.converged for estimate in (*(row.estimate for row in rows), *approximations))

    @property
    def verdict(self) -> str:
        """What the numbers mean, in a few sentences."""
        from hessinit.present.diagnostics_sentences import conclude_diagnostics
        from hessinit.present.products_columns import conclude_products
        from hessinit.present.sentences import conclude

        return " ".join(filter(None, (conclude(self), conclude_products(self), conclude_diagnostics(self))))

    def advice(
        self,
        optimizer: str = "sgd",
        *,
        lr: float | None = None,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
    ) -> LearningRateAdvice:
        """Rates for gradient descent ("sgd", "momentum", "nesterov"), and whether to warm up to `lr`.

        Adam's depend on the gradient, too: `hessinit.advise` measures them.
        """
        from hessinit.report.report_advice import advise_from_report

        return advise_from_report(self, optimizer, lr, momentum, dampening, weight_decay)

    def to_dict(self) -> dict[str, Plain]:
        """The report as what strict JSON can hold."""
        return {"kind": KIND, "schema": SCHEMA, **to_plain(self)}

    def to_json(self) -> str:
        """The report as strict JSON; `from_json` gives an equal one back."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Plain, *, source: str = "the data") -> CurvatureReport:
        """Rebuild a report of this or an older schema; unknown keys are ignored."""
        try:
            data = to_present_schema(data, source)
        except (KeyError, TypeError, AttributeError) as problem:
            raise _broken(source, problem) from problem
        try:
            return cls(
                layers=tuple(map(read_layer, data["layers"])),
                network=read_layer(data["network"]),
                curvature=str(data["curvature"]),
                loss=read_number(data["loss"]),
                examples=int(data["examples"]),
                batches=int(data["batches"]),
                tolerance=read_number(data["tolerance"]),
                seed=int(data["seed"]),
                engine=str(data["engine"]),
                engine_reason=str(data["engine_reason"]),
                seconds=read_if_there(read_number, data["seconds"]),
                gradients=read_if_there(read_number, data["gradients"]),
                notes=tuple(map(str, data["notes"])),
                versions={str(key): str(value) for key, value in data["versions"].items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as problem:
            raise _broken(source, problem) from problem

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "the text") -> CurvatureReport:
        """Rebuild a report from what `to_json` gave."""
        try:
            data = json.loads(text)
        except ValueError as problem:
            raise ValueError(
                f"{source} is not JSON ({problem}). Give a file that report.save() wrote."
            ) from problem
        return cls.from_dict(data, source=source)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, whole or not at all; `hessinit.load` reads it."""
        write_text(path, self.to_json())

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one web page that needs nothing else: charts to hover over, a table to sort."""
        from hessinit.present.page.curvature import curvature_page
        from hessinit.present.page.render import render_page

        write_text(path, render_page(curvature_page(self)))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the norms over depth, on `ax` or a new figure; `plt.show()` or `savefig` is up to you."""
        from hessinit.present.figure import draw_norms

        return draw_norms(self, ax)

    def plot_jacobians(self, axes: Sequence[Axes] | None = None) -> tuple[Axes, Axes]:
        """Draw the Jacobian products over depth, and ‖H‖ beside its bounds; on two axes, or new ones."""
        from hessinit.present.products_figure import draw_products

        return draw_products(self, axes)

    def plot_diagnostics(self, ax: Axes | None = None) -> Axes:
        """Draw the size of activations and gradients over depth, dead and saturated units as bars."""
        from hessinit.present.diagnostics_figure import draw_diagnostics

        return draw_diagnostics(self, ax)

    def plot_spectrum(self, layer: str = "network", ax: Axes | None = None) -> Axes:
        """Draw the spectral density and the largest eigenvalues of a layer, where they were asked for."""
        from hessinit.present.spectrum_figure import draw_spectrum

        return draw_spectrum(self, layer, ax)

    def __repr__(self) -> str:
        norm = f"{self.network.norm:.3g}"
        return f"<CurvatureReport of {len(self)} layers: curvature={self.curvature!r}, network.norm={norm}>"

    def __str__(self) -> str:
        from hessinit.present.table import render_text

        return render_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from hessinit.present.table import renderables

        yield from renderables(self, options.max_width)

    def _repr_html_(self) -> str:
        from hessinit.present.html import render_fragment

        return render_fragment(self)

    def _measured(self) -> tuple[LayerCurvature, ...]:
        if not self.layers:
            raise ValueError(
                "the report has no layers, so none is the sharpest or flattest; measure some first."
            )
        return self.layers


def _by_norm(layer: LayerCurvature) -> tuple[bool, float]:
    return math.isnan(layer.norm), layer.norm


def _broken(source: str, problem: Exception) -> ValueError:
    what = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
    return ValueError(f"{source} is not a whole report: {what}. Was the file edited or cut? Measure again.")
