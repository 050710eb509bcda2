"""Ctrl-C and a request to end, while torch is imported and after."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from result_examples import make_three_layers

from .conftest import ENVIRONMENT, SOURCE, interrupt

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

def converting():
    try:
        waiting()
    except KeyboardInterrupt:
        raise ImportError("half of it was there")
"""
COMMANDS = {
    "measure": "net.py:waiting", "initialize": "net.py:waiting --lr 0.1", "track": "net.py:waiting --lr 0.1",
    "compare": "net.py:waiting", "sweep": "net.py:waiting", "demo": "", "reproduce": "table-2 --data digits",
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_while_torch_is_imported_the_command_ends_at_once(folder, command):
    (folder / "torch.py").write_text(SLOW_TORCH)
    number = signal.SIGTERM if command == "sweep" else signal.SIGINT
    ended = interrupt(
        number, Path("begun").exists, command, *COMMANDS[command].split(),
        PYTHONPATH=os.pathsep.join([str(folder), str(SOURCE)]),
    )  # fmt: skip
    assert ended == (130, "", "Interrupted: stopped before anything was done, and nothing was written.\n")


@pytest.mark.parametrize(
    ("command", "number", "function"),
    [
        ("measure", signal.SIGINT, "waiting"),
        ("compare", signal.SIGTERM, "converting"),
        *(
            pytest.param(command, signal.SIGTERM, "waiting", marks=pytest.mark.sweep)
            for command in ("measure", "initialize", "track", "compare", "sweep")
        ),
    ],
)
def test_in_the_user_s_code_it_ends_with_a_line(folder, command, number, function):
    with (folder / "net.py").open("a") as file:
        file.write(WAITING)
    place = COMMANDS[command].replace("waiting", function)
    ended = interrupt(number, Path("begun").exists, command, *place.split())
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


def test_while_a_page_is_written_nothing_false_is_said(run_python):
    make_three_layers().save("report.json")
    result = run_python("""
import os, signal, sys
from hessinit import present
from hessinit.cli import main

present.to_page = lambda result: os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["hessinit", "show", "report.json", "--html", "page.html"]
main()
""")
    assert (result.returncode, result.stderr) == (130, "Interrupted: not everything was written.\n")
    assert "verdict" in result.stdout


def test_what_is_ignored_stays_ignored(folder):
    """As `nohup` and a shell's background jobs start a command."""
    (folder / "net.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    started = subprocess.run(
        [sys.executable, "-m", "hessinit", "measure", "net.py:problem"],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    assert started.stderr == "Error: net.py has no 'problem'. It defines no function.\n"
