from __future__ import annotations

import math
from dataclasses import replace

import matplotlib as mpl
import pytest

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure

from hessinit.present.example import example_report
from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.estimates import Density, Estimate


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def estimates(*values: float) -> tuple[Estimate, ...]:
    return tuple(Estimate(value, 0.01, True, "converged", 5) for value in values)


DENSITY = Density(
    nodes=(0.0, 2.0),
    weights=(0.9, 0.1),
    grid=(-1.0, 0.0, 1.0, 2.0),
    values=(1e-20, 4.0, 0.5, 0.04),
    error=0.1,
    probes=8,
    steps=30,
)


def make_report(**changes: object) -> CurvatureReport:
    """Its network and its fc1 with these changes."""
    report = example_report()
    layers = [replace(row, **changes) if row.name == "fc1" else row for row in report.layers]
    return replace(report, layers=tuple(layers), network=replace(report.network, **changes))


def test_the_density_is_drawn_through_its_numbers_on_a_logarithmic_axis():
    axes = make_report(density=DENSITY, eigenvalues=estimates(2.0, -1.0)).plot_spectrum()
    curve = next(line for line in axes.lines if line.get_label() == "density")
    assert list(curve.get_xdata()) == [-1.0, 0.0, 1.0, 2.0]
    assert list(curve.get_ydata()) == [4e-6, 4.0, 0.5, 0.04]  # the tail ends six decades below the peak
    assert axes.get_yscale() == "log"
    marks = next(line for line in axes.lines if line.get_marker() == "|")
    assert list(marks.get_xdata()) == [2.0, -1.0]
    assert marks.get_label() == "the 2 largest in size"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("eigenvalue", "density")


def test_without_a_density_eigenvalues_stand_by_rank_and_their_sign_is_told():
    axes = make_report(eigenvalues=estimates(64.0, -3.0, 0.5)).plot_spectrum("fc1")
    positive, negative = (container.lines[0] for container in axes.containers)
    assert positive.get_xydata().tolist() == [[1.0, 64.0], [3.0, 0.5]]
    assert negative.get_xydata().tolist() == [[2.0, 3.0]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["positive", "negative"]
    assert axes.get_title(loc="left").startswith("fc1, ")


def test_what_was_not_measured_is_refused_with_the_way_to_ask_for_it():
    with pytest.raises(
        ValueError,
        match=r"the spectrum of network was not measured; ask for it: measure\(..., density=True\)",
    ):
        make_report(density=None, eigenvalues=()).plot_spectrum()
    with pytest.raises(KeyError, match="fc9"):
        make_report(density=DENSITY).plot_spectrum("fc9")


def test_the_users_axes_are_used():
    axes = Figure().add_subplot()
    assert make_report(density=DENSITY).plot_spectrum("fc1", ax=axes) is axes
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"density": replace(DENSITY, grid=(), values=())},
        {"density": replace(DENSITY, values=(math.nan,) * 4)},
        {"density": None, "eigenvalues": estimates(0.0, 0.0)},
        {"density": None, "eigenvalues": estimates(math.inf, math.nan)},
        {"density": DENSITY, "eigenvalues": estimates(math.inf)},
    ],
)
def test_extremes_are_drawn_all_the_same(changes):
    axes = make_report(**changes).plot_spectrum()
    axes.figure.canvas.draw()
    assert axes.get_title(loc="left").startswith("network, ")
