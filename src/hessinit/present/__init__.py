"""Results as documents (`describe`), and documents as text, notebook cells, pages and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hessinit.results.result import presenter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hessinit.present.document import Document

# The class of a result → the module of hessinit.present that describes it, and its function.
DESCRIPTIONS = {
    "CurvatureReport": ("curvature", "describe_report"),
    "MeasurementPlan": ("curvature", "describe_expected"),
    "Initialization": ("initialization", "describe_initialization"),
    "SchemePlan": ("initialization", "describe_plan"),
    "LearningRateAdvice": ("advice", "describe_advice"),
    "Comparison": ("comparison", "describe_comparison"),
    "Tracking": ("track_record", "describe_tracking"),
    "Demonstration": ("demo", "describe_demonstration"),
}


def describe(result: Any) -> Document:
    """Return the document that describes a result, or several results in a list.

    A result of another package describes itself, by its methods `describe` and `describe_several`.
    """
    if isinstance(result, presenter("document").Document):
        return result
    if isinstance(result, list) and result and hasattr(result[0], "describe_several"):
        return type(result[0]).describe_several(result)
    if hasattr(result, "describe"):
        return result.describe()
    name = type(result).__name__
    if name not in DESCRIPTIONS:
        raise TypeError(f"a {name} cannot be described; what can is a {', '.join(DESCRIPTIONS)}.")
    module, function = DESCRIPTIONS[name]
    return getattr(presenter(module), function)(result)


def to_text(result: Any, width: int | None = None, *, color: bool = False) -> str:
    """Return the result as text of at most `width` columns (None: the terminal's, or 100)."""
    return presenter("terminal").render_text(describe(result), width, color=color)


def to_notebook(result: Any) -> str:
    """Return the result as an HTML fragment without scripts."""
    return presenter("page").render_fragment(describe(result))


def to_page(result: Any) -> str:
    """Return the result as one HTML page that loads nothing."""
    return presenter("page").render_page(describe(result))


def draw(
    result: Any, which: str | Sequence[str] | None = None, axes: Axes | Sequence[Axes] | None = None
) -> list[Axes]:
    """Draw the charts of these names (None: the first one), on `axes` or on a new figure."""
    document = describe(result)
    if which is None and not document.charts:
        raise ValueError(f"a {type(result).__name__} has no chart to draw; print it instead.")
    if which is None:
        which = document.charts[0].name
    names = [which] if isinstance(which, str) else which
    return presenter("figures").draw_charts([document.chart(name) for name in names], axes)


def to_figure(result: Any) -> Figure:
    """Return a new matplotlib figure of the charts that the document puts in a picture."""
    document = describe(result)
    names = {chart.name for chart in document.charts}
    axes = draw(result, [name for name in document.picture if name in names] or None)
    return axes[0].figure  # type: ignore[return-value]
