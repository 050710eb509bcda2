"""Batches sent through in pieces, and reports compared with the dense truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import hessinit
from calls import measure
from dense import dense_curvature, ends
from hessinit.curvature import gram as trace


def split_into(monkeypatch: pytest.MonkeyPatch, examples: int) -> list[int]:
    """Send every batch through in pieces of `examples`; returns a list that the sizes are added to."""
    gathered: list[int] = []
    gather = trace._gather

    def recorded(output: Tensor, *others: Any) -> None:
        gathered.append(output.shape[0])
        gather(output, *others)

    monkeypatch.setattr(trace, "_examples_at_once", lambda plan, root, size: min(examples, size))
    monkeypatch.setattr(trace, "_gather", recorded)
    return gathered


def assert_right(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Any,
    *,
    curvature: str = "gauss-newton",
    tolerance: float = 1e-8,
    measured: str | None = None,
    **options: Any,
) -> hessinit.CurvatureReport:
    """Check both ends of every layer and of the network, to 1e-6 of the norm; needs an fp64 model."""
    options |= {"curvature": measured or curvature, "tolerance": tolerance}
    report = measure(model, loss, batch, **options)
    truth = dense_curvature(model, loss, batch, curvature, hessian_by="loops")
    for name, matrix in {**truth.layers, "network": truth.network}.items():
        row = report.network if name == "network" else report[name]
        true = ends(matrix)
        assert row.top.value == pytest.approx(true.top, rel=0, abs=1e-6 * true.norm), name
        assert row.bottom.value == pytest.approx(true.bottom, rel=0, abs=1e-6 * true.norm), name
    return report
