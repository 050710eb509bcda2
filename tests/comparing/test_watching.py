"""The bar is for people at a terminal: on stderr, and only there."""

from __future__ import annotations

import digit_problem as problem
import pytest


def test_a_terminal_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    problem.small()
    out, err = capsys.readouterr()
    assert out == ""
    assert "8/8" in err
    problem.small(progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("wish", ["", "1"])
def test_a_pipe_shows_nothing(
    wish: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", wish)
    problem.small()
    assert capsys.readouterr() == ("", "")
