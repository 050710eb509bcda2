"""Ctrl-C and a request to end, while torch is imported and after."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from result_examples import make_three_layers

from .conftest import SOURCE, interrupt

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")

# Interrupted while it is imported, the real one swallows the exception, or makes an ImportError of it.
SLOW_TORCH = """
import pathlib, time
pathlib.Path("begun").touch()
for _ in range(2):
    try:
        time.sleep(600)
    except BaseException:
        pass
raise ImportError("cannot load module more than once per process")
"""
WAITING = """

def waiting():
    import pathlib, time
    pathlib.Path("begun").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("command", ["measure net.py:problem", "reproduce table-2 --data digits"])
def test_while_torch_is_imported_the_command_ends_at_once(folder, command):
    (folder / "torch.py").write_text(SLOW_TORCH)
    path = os.pathsep.join([str(folder), str(SOURCE)])
    ended = interrupt(signal.SIGINT, Path("begun").exists, *command.split(), PYTHONPATH=path)
    assert ended == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(("command", "number"), [("measure", signal.SIGINT), ("compare", signal.SIGTERM)])
def test_in_the_user_s_code_it_ends_with_a_line(folder, command, number):
    with (folder / "net.py").open("a") as file:
        file.write(WAITING)
    ended = interrupt(number, Path("begun").exists, command, "net.py:waiting")
    assert ended[:2] == (130, "")
    assert re.fullmatch(r"Interrupted: [^\n]+\.\n", ended[2]), ended[2]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("measure", "the measurement was not finished, and nothing was written."),
        ("initialize", "the initialization was not finished, and nothing was written."),
        ("track --lr 0.1", "stopped before the first step, and nothing was written."),
        ("compare", "stopped before the first run."),
    ],
)
def test_every_command_says_what_was_left(run, folder, command, message):
    (folder / "net.py").write_text("def problem():\n    raise KeyboardInterrupt\n")
    name, *options = command.split()
    result = run(name, "net.py:problem", *options)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == f"Interrupted: {message}\n"


def test_while_a_page_is_written_nothing_false_is_said(run, monkeypatch):
    def interrupted(result: object) -> str:
        raise KeyboardInterrupt

    make_three_layers().save("report.json")
    monkeypatch.setattr("hessinit.present.to_page", interrupted)
    result = run("show", "report.json", "--html", "page.html")
    assert (result.exit_code, result.stderr) == (130, "Interrupted: not everything was written.\n")
    assert "finding" in result.stdout
