"""What a terminal, a pipe, a file and a reader that leaves get from each command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from .conftest import SOURCE, on_a_terminal
from .exact_problems import EXACT

LOUD = """

import os, sys, warnings
from hessinit import ConvergenceWarning

def loud():
    print("a word on stdout")
    warnings.warn("a word of warning")
    warnings.warn("another", ConvergenceWarning)
    model, loss, batch = problem()
    return model, loss, batch
"""
TRAINED = "--steps 10 --batch-size 4"
JSON_COMMANDS = {
    "measure": "measure loud.py:loud --json --lr 1",
    "initialize": "initialize loud.py:loud --target 2 --json",
    "track": f"track loud.py:loud --lr 0.5 {TRAINED} --json",
    "compare": f"compare loud.py:loud --start default --lr 0.01 --seeds 1 {TRAINED} --workers 1 --json",
    "compare-in-workers": f"compare loud.py:loud --start he --lr 0.1 --seeds 2 {TRAINED} --workers 2 --json",
    "sweep": f"sweep loud.py:loud --std 0.1 --seeds 1 {TRAINED} --workers 1 --json",
    "reproduce": "reproduce table-2 --data digits --seeds 2 --workers 1 --json",
    "show": "show report.json --json",
}


@pytest.fixture
def folder(tmp_path, run, monkeypatch):
    (tmp_path / "loud.py").write_text(EXACT + LOUD, encoding="utf-8")
    (tmp_path / "exact.py").write_text(EXACT, encoding="utf-8")
    from hessinit.present.example import example_report

    example_report().save(tmp_path / "report.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not strict JSON")




def test_a_terminal_gets_colour_and_a_spinner(folder):
    seen = on_a_terminal("measure", "exact.py:problem", folder=folder, TERM="xterm")
    assert re.search(r"\x1b\[3\dm", seen)
    assert "Measuring exact.py:problem …" in seen


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}])
@pytest.mark.parametrize("command", ["measure exact.py:problem", "show report.json"])
def test_no_color_and_a_dumb_terminal_get_none(folder, variables, command):
    seen = on_a_terminal(*command.split(), folder=folder, **variables)
    assert not re.search(r"\x1b\[[\d;]*3\d[\d;]*m", seen), repr(seen)
    if variables["TERM"] == "dumb":
        assert "\x1b" not in seen, repr(seen)
    assert "verdict" in seen




@pytest.mark.parametrize(
    "command",
    [
        "measure exact.py:problem", "initialize exact.py:problem --target 2", "--help",
        f"track exact.py:problem --lr 0.02 {TRAINED}",
    ],
)  # fmt: skip
def test_a_pipe_gets_plain_text_of_forty_columns_also_in_ascii(run_process, folder, command):
    result = run_process(*shlex.split(command), COLUMNS="40", PYTHONIOENCODING="ascii", TERM="xterm-256color")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    if command != "--help":  # its examples stay whole, to be copied, and typer writes it as UTF-8 anyway
        assert result.stdout.isascii()
        assert max(map(len, result.stdout.splitlines())) <= 40, result.stdout
    assert "Traceback" not in result.stderr




def test_the_first_line_can_be_cut_off_by_head(folder):
    command = f'"{sys.executable}" -m hessinit show report.json | head -1'
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    result = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, encoding="utf-8"
    )
    assert result.stdout.split() == ["layer", "weight", "‖H‖", "gap", "verdict"]
    assert result.stderr == ""
