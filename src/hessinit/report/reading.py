"""Rebuild layers and estimates from plain data of the present schema. Keys it does not know are ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hessinit.estimate import Estimate
from hessinit.report.density import Density
from hessinit.report.diagnostics import read_diagnostics
from hessinit.report.json_form import Plain, read_number, read_numbers
from hessinit.report.layer import LayerCurvature
from hessinit.report.products import read_products
from hessinit.report.spread import Spread

Something = TypeVar("Something")


def read_estimate(data: Plain) -> Estimate:
    return Estimate(
        value=read_number(data["value"]),
        error=read_number(data["error"]),
        converged=bool(data["converged"]),
        reason=str(data["reason"]),
        products=int(data["products"]),
    )


def read_density(data: Plain) -> Density:
    return Density(
        nodes=read_numbers(data["nodes"]),
        weights=read_numbers(data["weights"]),
        grid=read_numbers(data["grid"]),
        values=read_numbers(data["values"]),
        error=read_number(data["error"]),
        probes=int(data["probes"]),
        steps=int(data["steps"]),
    )


def read_spread(data: Plain) -> Spread:
    return Spread(read_numbers(data["norms"]))


def read_layer(data: Plain) -> LayerCurvature:
    return LayerCurvature(
        name=str(data["name"]),
        aliases=tuple(map(str, data["aliases"])),
        shape=tuple(map(int, data["shape"])),
        curvature=str(data["curvature"]),
        top=read_estimate(data["top"]),
        bottom=read_estimate(data["bottom"]),
        approximation=read_if_there(read_estimate, data["approximation"]),
        trace=read_if_there(read_estimate, data["trace"]),
        frobenius=read_if_there(read_estimate, data["frobenius"]),
        eigenvalues=tuple(map(read_estimate, data["eigenvalues"])),
        density=read_if_there(read_density, data["density"]),
        spread=read_if_there(read_spread, data["spread"]),
        jacobians=read_if_there(
            read_products, data.get("jacobians")
        ),  # files of the first versions lack them
        diagnostics=read_if_there(read_diagnostics, data.get("diagnostics")),
        engine=str(data["engine"]),
        engine_reason=str(data["engine_reason"]),
    )


def read_if_there(read: Callable[[Plain], Something], data: Plain) -> Something | None:
    return None if data is None else read(data)
