"""Ctrl-C and a request to end, while torch is imported and after."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from .conftest import SOURCE
from .exact_problems import EXACT

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
    "measure": [],
    "initialize": ["--lr", "0.1"],
    "track": ["--lr", "0.1"],
    "compare": [],
    "sweep": [],
}


def interrupt(folder, number, *command, **variables):
    """Send the signal once the file `begun` is there; what the process said, and how it ended."""
    (folder / "waiting.py").write_text(EXACT + WAITING, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **variables}
    process = subprocess.Popen(
        [sys.executable, "-m", "hessinit", *command],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while not (folder / "begun").exists():
            assert time.monotonic() < deadline, process.poll()
            time.sleep(0.02)
        time.sleep(0.1)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=300)  # half of what they wait
    finally:
        process.kill()
    return process.returncode, stdout, stderr


@pytest.mark.parametrize(
    ("command", "number"),
    [(command, signal.SIGINT) for command in (*COMMANDS, "demo", "reproduce")]
    + [("measure", signal.SIGTERM)],
)
def test_while_torch_is_imported_the_command_ends_at_once(tmp_path, command, number):
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    given = [f"{tmp_path}/waiting.py:waiting", *COMMANDS[command]] if command in COMMANDS else []
    given = ["table-2", "--data", "digits"] if command == "reproduce" else given
    path = os.pathsep.join([str(tmp_path), str(SOURCE)])
    ended = interrupt(tmp_path, number, command, *given, PYTHONPATH=path)
    assert ended == (130, "", "Interrupted: stopped before anything was done, and nothing was written.\n")


@pytest.mark.parametrize(
    ("command", "number", "function"),
    [(command, signal.SIGTERM, "waiting") for command in COMMANDS]
    + [("measure", signal.SIGINT, "waiting"), ("compare", signal.SIGINT, "converting")],
)
def test_in_the_user_s_code_it_ends_with_a_line(tmp_path, command, number, function):
    ended = interrupt(tmp_path, number, command, f"waiting.py:{function}", *COMMANDS[command])
    assert ended[:2] == (130, "")
    assert re.fullmatch(r"Interrupted: [^\n]+\.\n", ended[2]), ended[2]


def test_a_request_to_end_names_the_runs_that_are_kept(tmp_path):
    slow = "\n\ndef slow():\n    import time\n    model, loss, batch = problem()\n"
    slow += "    model.register_forward_pre_hook(pause)\n    return model, loss, batch\n"
    slow += "\n\ndef pause(*_):\n    import time\n    time.sleep(0.02)\n"
    slow += "    import pathlib\n    if list(pathlib.Path('runs').glob('**/*.json*')):\n"
    slow += "        pathlib.Path('begun').touch()\n"
    (tmp_path / "slow.py").write_text(EXACT + slow, encoding="utf-8")
    options = [
        "--schemes",
        "default",
        "--learning-rates",
        "0.01",
        "--seeds",
        "50",
        "--steps",
        "10",
        "--batch-size",
        "4",
    ]
    code, stdout, stderr = interrupt(
        tmp_path, signal.SIGTERM, "compare", "slow.py:slow", *options, "--folder", "runs", "--workers", "2"
    )
    assert (code, stdout) == (130, "")
    assert re.fullmatch(r"Interrupted: .*The same command .*\n", stderr), stderr


def test_while_a_saved_result_is_written_again_nothing_false_is_said(tmp_path, run_python):
    from hessinit.present.example import example_report

    example_report().save(tmp_path / "report.json")
    result = run_python("""
import os, signal, sys
from hessinit.cli import main
from hessinit.results.curvature_report import CurvatureReport

def write_half(self, path):
    with open("page.html.tmp", "w"):
        os.kill(os.getpid(), signal.SIGINT)

CurvatureReport.to_html = write_half
sys.argv = ["hessinit", "show", "report.json", "--html", "page.html"]
main()
""")
    assert (result.returncode, result.stderr) == (130, "Interrupted: not everything was written.\n")
    assert "verdict" in result.stdout


def test_what_is_ignored_stays_ignored(tmp_path):
    """As `nohup` and a shell's background jobs start a command."""
    (tmp_path / "net.py").write_text(
        EXACT + "\n\nimport os, signal\nos.kill(os.getpid(), signal.SIGINT)\n", encoding="utf-8"
    )
    started = subprocess.run(
        [sys.executable, "-m", "hessinit", "measure", "net.py:problem"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    assert "verdict" in started.stdout
