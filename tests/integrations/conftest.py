"""Runs of callbacks last milliseconds: they are measured as often as asked for."""

from __future__ import annotations

import pytest

from hessinit.training.track import Budget


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the share is kept is tested with the tracker."""
    monkeypatch.setattr(Budget, "affords", lambda self: True)
