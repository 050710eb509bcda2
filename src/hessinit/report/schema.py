"""The versions of the report's file form, and how an old one becomes a new one."""

from __future__ import annotations

from collections.abc import Callable

from hessinit.report.json_form import Plain

SCHEMA = 2
KIND = "hessinit curvature report"


def to_present_schema(data: Plain, source: str) -> Plain:
    """Check that `data` is a report and bring it to the present schema; messages call it `source`."""
    if not isinstance(data, dict) or "layers" not in data or type(data.get("schema")) is not int:
        found = f"an object with {_some(data)}" if isinstance(data, dict) else f"a {type(data).__name__}"
        raise ValueError(
            f"{source} is not a hessinit report: it holds {found}, and a report is an object with "
            "'schema' (a whole number) and 'layers'. Give a file that report.save() wrote."
        )
    if data.get("kind", KIND) != KIND:
        raise ValueError(f"{source} holds {data['kind']!r}, and a curvature report is wanted here.")
    schema = data["schema"]
    if schema > SCHEMA:
        raise ValueError(
            f"{source} has report schema {schema}, and this hessinit reads up to {SCHEMA}: it comes from a "
            "newer version. Upgrade with `pip install --upgrade hessinit`, or measure again."
        )
    if schema < 1:
        raise ValueError(
            f"{source} has report schema {schema}; schemas start at 1. Was the file edited? Measure again."
        )
    for older in range(schema, SCHEMA):
        data = MIGRATIONS[older](data)
    return data


def from_schema_1(data: Plain) -> Plain:
    """Schema 1 had flat numbers with one error for both ends, and no approximation, spread or notes."""

    def lift(layer: Plain) -> Plain:
        def estimate(value: Plain, products: int) -> Plain:
            shared = {key: layer[key] for key in ("error", "converged", "reason")}
            return {"value": value, "products": products, **shared}

        absent = dict.fromkeys(("approximation", "trace", "frobenius", "density", "spread"))
        lifted = {key: value for key, value in layer.items() if key != "norm"}
        ends = {"top": estimate(layer["top"], layer["products"]), "bottom": estimate(layer["bottom"], 0)}
        return {**absent, "eigenvalues": [], "aliases": [], **lifted, **ends}

    layers, network = [lift(layer) for layer in data["layers"]], lift(data["network"])
    return {**data, "schema": 2, "kind": KIND, "layers": layers, "network": network, "notes": []}


MIGRATIONS: dict[int, Callable[[Plain], Plain]] = {1: from_schema_1}


def _some(data: dict[str, Plain]) -> str:
    shown = ", ".join(repr(key) for key in list(data)[:5])
    return f"the keys {shown}{', …' if len(data) > 5 else ''}" if data else "no keys"
