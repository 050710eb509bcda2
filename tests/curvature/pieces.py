"""Helpers of these tests: batches sent through in pieces, and reports held against the dense truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import hessinit
from calls import call
from dense import dense_curvature, ends
from hessinit.curvature import gram as trace


def split_into(monkeypatch: pytest.MonkeyPatch, examples: int) -> list[int]:
    """Let every batch go through in pieces of so many examples; the list holds the sizes gathered."""
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
    """Both ends of every layer and of the network to 1e-6 of the norm; the model has to be in fp64."""
    options |= {"curvature": measured or curvature, "tolerance": tolerance}
    report = call(hessinit.measure, model, loss, batch, **options)
    truth = dense_curvature(model, loss, batch, curvature, hessian_by="loops")
    for name, matrix in {**truth.layers, "network": truth.network}.items():
        row, true = report.network if name == "network" else report[name], ends(matrix)
        assert row.top.value == pytest.approx(true.top, rel=0, abs=1e-6 * true.norm), name
        assert row.bottom.value == pytest.approx(true.bottom, rel=0, abs=1e-6 * true.norm), name
    return report
