"""Stdout holds the result and nothing else, and a stdout that takes nothing costs no file."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

from hessinit import load

from .conftest import SOURCE
from .exact_problems import EXACT

# Past sys.stdout: a C library, another program, what runs when Python ends.
NOISY = """

import atexit, os, subprocess
atexit.register(print, "noise at the end")
os.write(1, b"noise from C\\n")

def noisy():
    subprocess.run(["echo", "noise from a program"])
    return problem()
"""
TRAINED = "--steps 10 --batch-size 4"
RUNS = f"{TRAINED} --seeds 1 --workers"
NOISY_COMMANDS = {
    "measure": "measure noisy.py:noisy",
    "initialize": "initialize noisy.py:noisy --target 2",
    "track": f"track noisy.py:noisy --lr 0.02 {TRAINED}",
    "compare": f"compare noisy.py:noisy --start default --lr 0.01 {RUNS} 1",
    "compare-in-workers": f"compare noisy.py:noisy --start default --start he --lr 0.01 {RUNS} 2",
    "sweep": f"sweep noisy.py:noisy --std 0.1 {RUNS} 1",
}
needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "noisy.py").write_text(EXACT + NOISY, encoding="utf-8")
    (tmp_path / "exact.py").write_text(EXACT, encoding="utf-8")
    return tmp_path


def in_a_shell(folder, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        ["sh", "-c", command.replace("hessinit", f"{shlex.quote(sys.executable)} -m hessinit", 1)],
        cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=300,
    )  # fmt: skip


@needs_posix
@pytest.mark.parametrize("name", NOISY_COMMANDS)
def test_json_is_pure_whatever_writes_past_python(folder, run_process, name):
    result = run_process(*shlex.split(NOISY_COMMANDS[name]), "--json")
    assert result.returncode == 0, result.stderr
    assert isinstance(json.loads(result.stdout), dict)
    for noise in ("noise from C", "noise from a program", "noise at the end"):
        assert noise in result.stderr


@needs_posix
@pytest.mark.parametrize("stdout", ["> /dev/full", ">&-"])
@pytest.mark.parametrize("form", ["", "--json"])
def test_files_are_written_where_stdout_takes_nothing(folder, stdout, form):
    command = f"hessinit measure exact.py:problem {form} --save r.json --html r.html {stdout}"
    result = in_a_shell(folder, command)
    reason = "stdout is closed" if stdout == ">&-" else "No space left on device"
    assert result.stderr == (
        f"Error: the result cannot be printed: {reason}.\nWrote r.json.\nWrote r.html.\n"
    )
    assert result.returncode == 2
    assert load(folder / "r.json").layers
    assert (folder / "r.html").stat().st_size > 1000


@needs_posix
@pytest.mark.parametrize("stdout", ["> /dev/full", ">&-"])
@pytest.mark.parametrize(
    "command",
    ["--help", "--version", "measure --help", "new fresh.py", "show r.json", "show r.json --json",
     f"track exact.py:problem --lr 0.02 --initialize {TRAINED}",
     "reproduce table-2 --data digits --seeds 2 --workers 1"],
)  # fmt: skip
def test_whatever_cannot_be_printed_is_said_in_a_line(folder, command, stdout):
    from hessinit.present.example import example_report

    example_report().save(folder / "r.json")
    result = in_a_shell(folder, f"hessinit {command} {stdout}")
    assert result.returncode == 2
    assert "Error: the result cannot be printed: " in result.stderr
    assert result.stderr.count("Error:") == 1
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr
    assert (folder / "fresh.py").exists() == command.startswith("new")


@needs_posix
def test_a_closed_stderr_ends_nothing(folder):
    result = in_a_shell(folder, "hessinit measure noisy.py:noisy --json 2>&-")
    assert result.returncode == 0
    assert json.loads(result.stdout)["layers"]
